/* A slot pool in one process: mapped, checked, with a private copy of the geometry.
 *
 * Invariants: after SHARED_OK from pool_open, bounds never come from shared memory again. Payload
 * is mapped read-only until this process becomes a writer. */
#pragma once

#include "base/shared_file.h"
#include "pool/layout.h"

struct pool {
    struct shared_file file;
    uint8_t *slots; /* NULL in a pool opened only for a look */
    bool writable; /* the slots are mapped writable */
    uint64_t file_bytes;
    uint64_t slots_offset;
    uint64_t slot_stride;
    uint64_t slot_bytes;
    uint64_t meta_bytes;
    uint64_t block_bytes;
    uint64_t patch_bytes;
    uint64_t created_unix_ns;
    uint32_t max_slots;
    struct pool_header *header;
    struct slot_row *slot_rows;
    struct rank_row *rank_rows;
    struct reader_row *reader_rows;
    int32_t rank;                    /* rank of this process; -1: no rank */
    int32_t reader;                  /* reader row of this process; -1: no row */
    bool keeps_row;                  /* a regular end leaves the row behind like a death */
    uint32_t leases[POOL_MAX_SLOTS]; /* of this process; the last lease drops the lock */
    uint32_t own_writes;             /* slots taken by this publisher, by bit */
};

struct pool_geometry {
    uint32_t slots; /* number of slots with memory from the start */
    uint32_t max_slots;
    uint64_t slot_bytes;
    uint64_t meta_bytes;
    uint64_t block_bytes;
    uint64_t patch_bytes;
    /* Computed by pool_plan: */
    uint64_t slots_offset;
    uint64_t slot_stride;
    uint64_t file_bytes;
};

/* False when the numbers cannot make a pool. */
bool pool_plan(struct pool_geometry *plan);
/* Makes a pool of a new, empty file, the magic last. Takes fd over when it succeeds. */
enum shared_status pool_create(struct pool *self, int fd, const struct pool_geometry *plan);
/* Maps a pool and checks it; read_only maps no slot. Takes ownership of fd on success. */
enum shared_status pool_open(struct pool *self, int fd, bool read_only);
void pool_unmap(struct pool *self);
/* Makes the slots writable in this process. */
enum shared_status pool_allow_writing(struct pool *self);
/* Gives one more slot its memory; SHARED_NOTHING if every slot has memory. */
enum shared_status pool_grow(struct pool *self);
/* For a forked child: makes its mappings inaccessible. The caller closes file.fd. */
void pool_isolate(struct pool *self);

uint32_t pool_digest_room(const struct pool *self); /* blocks of a full slot */

enum pool_bell { POOL_BELL_VERSION = 0, POOL_BELL_SPACE, POOL_BELL_RANKS, POOL_BELLS };
static inline struct bell *pool_bell(struct pool *self, enum pool_bell which) {
    return which == POOL_BELL_VERSION ? &self->header->bell
           : which == POOL_BELL_SPACE ? &self->header->space_bell
                                      : &self->header->ranks_bell;
}

static inline uint8_t *pool_payload(const struct pool *self, uint32_t slot) {
    return self->slots + slot * self->slot_stride;
}
static inline uint8_t *pool_meta(const struct pool *self, uint32_t slot) {
    return pool_payload(self, slot) + pool_align_up(self->slot_bytes, POOL_PAGE);
}
static inline uint32_t *pool_digests(const struct pool *self, uint32_t slot) {
    return (uint32_t *)(pool_meta(self, slot) + pool_align_up(self->meta_bytes, POOL_PAGE));
}
static inline uint8_t *pool_patches(const struct pool *self, uint32_t slot) {
    uint64_t digests = pool_digest_room(self) * sizeof(uint32_t);
    return (uint8_t *)pool_digests(self, slot) + pool_align_up(digests, POOL_PAGE);
}
/* A rank's share of the patch bytes. */
static inline uint64_t pool_patch_share(const struct pool *self, uint32_t ranks) {
    return self->patch_bytes / ranks / POOL_PATCH_ALIGNMENT * POOL_PATCH_ALIGNMENT;
}

/* ---- Digests of a slot's payload by block: CRC-32C, the same value on every machine. They find bytes
 * that changed by accident, not an attacker. */
/* One value for every block of `block_bytes`; the last block may be shorter. Returns the number of
 * blocks. */
uint32_t digest_blocks(const void *data, uint64_t bytes, uint64_t block_bytes, uint32_t *digests);
/* The first block in [from, to) that differs from its digest; `to` if every block matches. */
uint32_t digest_first_wrong(const void *data, uint64_t bytes, uint64_t block_bytes,
                            const uint32_t *digests, uint32_t from, uint32_t to);

/* ---- Participants of a pool: writing ranks, readers, and their rows.
 *
 * Invariant: the holder of a row's lock byte owns the row. A dead process's row is free; a leftover
 * pid marks the death. */
/* Becomes a rank; rank 0 is the publisher. SHARED_HELD if a living process owns the rank. */
enum shared_status rows_claim_writer(struct pool *self, uint32_t rank, const char *label,
                                   uint32_t pid);
/* Becomes a reader, preferably in the row of a dead reader of the same label. With `keeps_row` a
 * regular end leaves the row behind like a death. SHARED_HELD if every row is taken. */
enum shared_status rows_claim_reader(struct pool *self, const char *label, const char *device,
                                   uint32_t pid, bool keeps_row);
/* A regular end: notes the end in the row, unless the reader keeps the row, and drops the lock. */
void rows_leave(struct pool *self);

enum row_life {
    ROW_FREE = 0, /* never used, or ended regularly */
    ROW_ALIVE,
    ROW_DEAD,
};
enum row_life rows_writer_life(const struct pool *self, uint32_t rank);
enum row_life rows_reader_life(const struct pool *self, uint32_t row);

/* This reader runs the version. */
void rows_applied(struct pool *self, uint64_t sequence, int64_t version);
/* This reader refused the version and keeps its old version. */
void rows_refused(struct pool *self, uint64_t sequence, int64_t version, int32_t code,
                  const char *text);

/* ---- Reading a pool: a lease lasts as long as this process copies the version or views it.
 *
 * Invariants: a leased slot is never written. A leased version is whole: its row was checked under
 * the lock that keeps the publisher out. The kernel ends the leases of a dead reader. */
/* Leases the newest version above `after`, else SHARED_NOTHING; or SHARED_DAMAGED. */
enum shared_status lease_latest(struct pool *self, uint64_t after, uint32_t *slot,
                              struct slot_row *row);
/* Leases the whole version with this number, newest or not; SHARED_NOTHING without such a
 * version. */
enum shared_status lease_version(struct pool *self, int64_t version, uint32_t *slot,
                               struct slot_row *row);
void lease_drop(struct pool *self, uint32_t slot);
/* Copies a row without a lock; false if the row is changing or damaged. */
bool lease_peek(const struct pool *self, uint32_t slot, struct slot_row *row);
/* Sequence and slot of the newest version without a lease; 0: no version. */
uint64_t lease_newest(const struct pool *self);

/* ---- Writing a version into a pool: by one publisher, or by several ranks with rank 0 as
 * publisher.
 *
 * Invariants: the newest whole version is never overwritten, despite deaths. A slot is written
 * under its exclusive lock, or by a rank that holds its piece of the slot; no publisher takes a
 * slot while either lock is held. Only the publisher stores `latest`, as the last step, after the
 * slot's unlock. */
/* A publisher's description of a version; text and meta are copied. */
struct version_facts {
    int64_t version;
    uint64_t bytes;
    uint64_t meta_bytes;
    const void *meta;
    const char *text;
    uint32_t ranks;
    bool patches; /* allow patches against the newest version */
};

/* For the publisher: takes a slot for every rank; SHARED_NOTHING without a free slot. */
enum shared_status publish_begin(struct pool *self, const struct version_facts *facts,
                               uint32_t *slot, uint64_t *sequence);
/* Publishes the complete version. digests: number of blocks with a digest in the slot. */
void publish_finish(struct pool *self, uint32_t slot, uint64_t sequence, uint32_t digests);
/* Gives the version up; its slot stays taken until no local process can write the slot. */
void publish_give_up(struct pool *self);
void publish_let_go(struct pool *self, uint32_t slot);
void publish_count_skipped(struct pool *self);

/* For a rank: joins the version under way, if not written yet; else SHARED_NOTHING. */
enum shared_status publish_join(struct pool *self, uint32_t *slot, struct slot_row *row);
/* Marks the rank's piece as written, or fails the version; the piece stays taken until no local
 * process can write it. */
void publish_piece_done(struct pool *self, uint64_t sequence);
void publish_piece_failed(struct pool *self, uint64_t sequence, const char *error);
void publish_piece_let_go(struct pool *self, uint32_t slot);
/* The outcome of a joined version: OK if whole, NOTHING if unfinished, GONE if given up. */
enum shared_status publish_outcome(const struct pool *self, uint64_t sequence);

enum piece_state {
    PIECE_ABSENT = 0, /* rank not present, and not begun */
    PIECE_AWAITED,
    PIECE_BEGUN,
    PIECE_DONE,
    PIECE_FAILED,
    PIECE_DEAD, /* died during its write */
};
/* A rank's progress with a version, for the publisher. */
enum piece_state publish_piece_state(const struct pool *self, uint64_t sequence, uint32_t rank);
