/* A file of shared memory: made, mapped and checked. What bus, pool and channel have in common.
 *
 * Each begins with a magic, which is stored last, and a layout version; then comes its geometry, and
 * behind that the geometry's checksum. Invariants: what a header says is believed only of a copy that
 * was checked. Locks live on a description that nothing maps: a mapping holds its description too,
 * and a forked child inherits mappings, so that the lock of a mapped one would outlive its owner. */
#ifndef SHMBUS_BASE_SHARED_FILE_H
#define SHMBUS_BASE_SHARED_FILE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum shared_status {
    SHARED_OK = 0,
    SHARED_SYSTEM_ERROR, /* errno says which */
    SHARED_NO_SPACE,     /* /dev/shm cannot hold it */
    SHARED_NO_MEMORY,    /* the kernel gives this process no mapping of it, or no memory */
    SHARED_UNFINISHED,   /* its creator has not stored the magic (yet), or it is being removed */
    SHARED_BAD_MAGIC,
    SHARED_BAD_VERSION,  /* found_version says which */
    SHARED_BAD_HASH,     /* of a bus: the same version, compiled from other structs */
    SHARED_BAD_GEOMETRY, /* checksum or bounds of the header are wrong */
    SHARED_TRUNCATED,    /* shorter than its header says; found_bytes says how long */
    SHARED_NOTHING,      /* nothing there, nothing newer, nothing free */
    SHARED_HELD,         /* another process has it */
    SHARED_DAMAGED,      /* what the segment says of a part of it is not true */
    SHARED_GONE,         /* it was given up */
};

/* What the files of a kind begin with. */
struct shared_header {
    _Atomic uint64_t magic;
    uint32_t layout_version;
};

struct shared_kind {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t header_bytes;
    uint32_t crc_at; /* of the checksum; it covers what lies before it, less the magic */
    uint32_t tables_bytes;
};

/* Such a file as one process sees it. */
struct shared_file {
    int fd;           /* a description of its own, for locks */
    uint8_t *control; /* header and tables */
    bool read_only;   /* opened to look at only */
    uint32_t found_version;
    uint64_t found_bytes;
};

/* Gives a new, empty file its size and its tables, mapped. Takes fd over when it succeeds. */
enum shared_status shared_create(struct shared_file *self, const struct shared_kind *kind, int fd,
                                 uint64_t file_bytes, uint64_t allocated);
/* Maps the tables, and copies the header checked. read_only: nothing is ever written. */
enum shared_status shared_open(struct shared_file *self, const struct shared_kind *kind, int fd,
                               bool read_only, void *copy);
void shared_unmap(struct shared_file *self, const struct shared_kind *kind);

/* Of a header whose geometry is written: the checksum, then the magic. */
void shared_publish(const struct shared_kind *kind, void *header);
/* Magic and version, and a copy of the header for all further checks. */
enum shared_status shared_look(const struct shared_kind *kind, const void *header, void *copy,
                               uint32_t *found_version);
bool shared_crc_holds(const struct shared_kind *kind, const void *copy);
/* Whether the file may have `least` bytes of tables. */
enum shared_status shared_size(int fd, uint64_t least, uint64_t *found_bytes);
/* Memory for a range of the file, zeroed, so that no store into it can fail later. */
enum shared_status shared_allocate(int fd, uint64_t from, uint64_t bytes);
/* A description of the same file without locks, so that it may be mapped; -1 with errno. */
int shared_reopen(int fd, bool read_only);
/* Maps a range through such a description; NULL with errno. */
uint8_t *shared_map(int fd, uint64_t from, uint64_t bytes, int protection, bool read_only);

#endif
