/* A file of shared memory: made, mapped and checked. The common base of bus, pool and channel.
 *
 * A file begins with a magic, stored last, and a layout version; then follow its geometry and the
 * geometry's checksum. Invariants: header values are trusted only from a checked copy. Locks live
 * on an unmapped description: a mapping keeps its description open, and a forked child inherits
 * mappings, so the lock of a mapped description would outlive its owner. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Accesses to shared fields, named after their memory order. */
#define RELAXED(field) atomic_load_explicit(&(field), memory_order_relaxed)
#define ACQUIRE(field) atomic_load_explicit(&(field), memory_order_acquire)
#define SET_RELAXED(field, value) atomic_store_explicit(&(field), value, memory_order_relaxed)
#define SET_RELEASE(field, value) atomic_store_explicit(&(field), value, memory_order_release)
/* True if the field held `from`; false, without ordering, with its value in `from`. */
#define EXCHANGE(field, from, to, order) \
    atomic_compare_exchange_strong_explicit(&(field), &(from), to, order, memory_order_relaxed)

enum shared_status {
    SHARED_OK = 0,
    SHARED_SYSTEM_ERROR, /* see errno */
    SHARED_NO_SPACE,     /* /dev/shm lacks space */
    SHARED_NO_MEMORY,    /* the kernel refuses this process a mapping, or memory */
    SHARED_UNFINISHED,   /* magic not stored (yet), or removal in progress */
    SHARED_BAD_MAGIC,
    SHARED_BAD_VERSION,  /* see found_version */
    SHARED_BAD_HASH,     /* of a bus: same version, compiled from different structs */
    SHARED_BAD_GEOMETRY, /* wrong checksum or bounds of the header */
    SHARED_TRUNCATED,    /* shorter than the header's size; see found_bytes */
    SHARED_NOTHING,      /* missing, not newer, or not free */
    SHARED_HELD,         /* held by another process */
    SHARED_DAMAGED,      /* contradictory contents in a part of the segment */
    SHARED_GONE,         /* given up */
};

/* The first fields of every kind's header. */
struct shared_header {
    _Atomic uint64_t magic;
    uint32_t layout_version;
};

struct shared_kind {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t header_bytes;
    uint32_t crc_at; /* offset of the checksum, which covers the bytes before, except the magic */
    uint32_t tables_bytes;
};

/* A shared file in one process. */
struct shared_file {
    int fd;           /* a private description, for locks */
    uint8_t *control; /* header and tables */
    bool read_only;   /* opened to look at only */
    uint32_t found_version;
    uint64_t found_bytes;
};

/* Gives a new, empty file its size and its mapped tables. Takes ownership of fd on success. */
enum shared_status shared_create(struct shared_file *self, const struct shared_kind *kind, int fd,
                                 uint64_t file_bytes, uint64_t allocated);
/* Maps the tables, and copies the checked header. read_only: never writes. */
enum shared_status shared_open(struct shared_file *self, const struct shared_kind *kind, int fd,
                               bool read_only, void *copy);
void shared_unmap(struct shared_file *self, const struct shared_kind *kind);

/* Stores the checksum, then the magic, of a header with complete geometry. */
void shared_publish(const struct shared_kind *kind, void *header);
/* Magic and version, and a copy of the header for all further checks. */
enum shared_status shared_look(const struct shared_kind *kind, const void *header, void *copy,
                               uint32_t *found_version);
bool shared_crc_holds(const struct shared_kind *kind, const void *copy);
/* Checks that the file has at least `least` bytes for tables. */
enum shared_status shared_size(int fd, uint64_t least, uint64_t *found_bytes);
/* Allocates zeroed memory for a range of the file: later stores cannot fail. */
enum shared_status shared_allocate(int fd, uint64_t from, uint64_t bytes);
/* Opens a description of the same file without locks, for mappings; -1 with errno. */
int shared_reopen(int fd, bool read_only);
/* Maps a range through such a lock-free description; NULL with errno. */
uint8_t *shared_map(int fd, uint64_t from, uint64_t bytes, int protection, bool read_only);
