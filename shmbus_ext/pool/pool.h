/* A slot pool as one process sees it: mapped, checked, and with its own copy of the geometry.
 *
 * Invariants: after pool_open has said SHARED_OK, no bound is ever read from shared memory again.
 * Payload is mapped read-only until this process is a writer. */
#ifndef SHMBUS_POOL_POOL_H
#define SHMBUS_POOL_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/shared_file.h"
#include "pool/layout.h"

struct pool {
    struct shared_file file;
    uint8_t *slots; /* NULL in a pool that was opened to look at only */
    bool writable; /* the slots are mapped so */
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
    int32_t rank;                    /* that this process is; -1 for none */
    int32_t reader;                  /* its row; -1 for none */
    bool keeps_row;                  /* a regular end leaves the row behind like a death */
    uint32_t leases[POOL_MAX_SLOTS]; /* of this process; the lock goes with the last */
    uint32_t own_writes;             /* slots that this publisher has taken, by bit */
};

struct pool_geometry {
    uint32_t slots; /* that have memory from the beginning */
    uint32_t max_slots;
    uint64_t slot_bytes;
    uint64_t meta_bytes;
    uint64_t block_bytes;
    uint64_t patch_bytes;
    /* What pool_plan makes of these: */
    uint64_t slots_offset;
    uint64_t slot_stride;
    uint64_t file_bytes;
};

/* False when the numbers cannot make a pool. */
bool pool_plan(struct pool_geometry *plan);
/* Makes a pool of a new, empty file, the magic last. Takes fd over when it succeeds. */
enum shared_status pool_create(struct pool *self, int fd, const struct pool_geometry *plan);
/* Maps a pool and checks it; read_only maps no slot. Takes fd over when it succeeds. */
enum shared_status pool_open(struct pool *self, int fd, bool read_only);
void pool_unmap(struct pool *self);
/* Makes the slots writable in this process. */
enum shared_status pool_allow_writing(struct pool *self);
/* Gives one more slot its memory; SHARED_NOTHING where all have theirs. */
enum shared_status pool_grow(struct pool *self);
/* For a forked child: what it mapped cannot be touched any more. The caller closes file.fd. */
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
/* Each rank's share of them. */
static inline uint64_t pool_patch_share(const struct pool *self, uint32_t ranks) {
    return self->patch_bytes / ranks / POOL_PATCH_ALIGNMENT * POOL_PATCH_ALIGNMENT;
}

/* ---- Digests of a slot's payload by block: CRC-32C, the same value on every machine. They find bytes
 * that changed by accident, not an attacker. */
/* One value a block of `block_bytes`; the last block may be shorter. Returns how many. */
uint32_t digest_blocks(const void *data, uint64_t bytes, uint64_t block_bytes, uint32_t *digests);
/* The first block in [from, to) that differs from its digest; `to` for none. */
uint32_t digest_first_wrong(const void *data, uint64_t bytes, uint64_t block_bytes,
                            const uint32_t *digests, uint32_t from, uint32_t to);

/* ---- Who takes part in a pool: ranks that write, readers, and what each says of itself.
 *
 * Invariant: a row belongs to whoever holds its lock byte, so a dead process's row is free, and is
 * known for a dead one's by a pid that was not taken back. */
/* Becomes a rank; rank 0 is the publisher. SHARED_HELD where a living process is it. */
enum shared_status rows_claim_writer(struct pool *self, uint32_t rank, const char *label,
                                   uint32_t pid);
/* Becomes a reader, first in the row of a dead reader of that label. With `keeps_row` a regular end
 * leaves the row behind like a death. SHARED_HELD where all rows are taken. */
enum shared_status rows_claim_reader(struct pool *self, const char *label, const char *device,
                                   uint32_t pid, bool keeps_row);
/* A regular end: the row says so, unless the reader keeps the row; its lock is free. */
void rows_leave(struct pool *self);

enum row_life {
    ROW_FREE = 0, /* nobody was ever there, or it ended regularly */
    ROW_ALIVE,
    ROW_DEAD,
};
enum row_life rows_writer_life(const struct pool *self, uint32_t rank);
enum row_life rows_reader_life(const struct pool *self, uint32_t row);

/* This reader runs that version. */
void rows_applied(struct pool *self, uint64_t sequence, int64_t version);
/* This reader could not take that version; what it runs stays as it was. */
void rows_refused(struct pool *self, uint64_t sequence, int64_t version, int32_t code,
                  const char *text);

/* ---- Reading a pool: a version is leased for as long as anybody in this process copies it or has
 * views of it.
 *
 * Invariants: a leased slot is not written. What is leased was whole: its row was checked under the
 * lock that keeps the publisher out. A reader that dies has its leases ended by the kernel. */
/* Leases the newest version above `after`, else SHARED_NOTHING; or SHARED_DAMAGED. */
enum shared_status lease_latest(struct pool *self, uint64_t after, uint32_t *slot,
                              struct slot_row *row);
/* Leases the whole version of that number, newest or not; SHARED_NOTHING for none. */
enum shared_status lease_version(struct pool *self, int64_t version, uint32_t *slot,
                               struct slot_row *row);
void lease_drop(struct pool *self, uint32_t slot);
/* Copies a row for whoever holds no lock; false where it changed meanwhile or is damaged. */
bool lease_peek(const struct pool *self, uint32_t slot, struct slot_row *row);
/* Sequence and slot of the newest version without leasing it; 0 for none. */
uint64_t lease_newest(const struct pool *self);

/* ---- Writing a version into a pool: by one publisher, or by several ranks of which rank 0 is it.
 *
 * Invariants: the newest whole version is never overwritten, whoever dies. A slot is written under
 * its exclusive lock, or by a rank that holds its piece of it; nobody takes a slot while any of
 * these is held. `latest` is stored last, by the publisher alone, after the slot is unlocked. */
/* What a version is, from its publisher; text and meta are copied. */
struct version_facts {
    int64_t version;
    uint64_t bytes;
    uint64_t meta_bytes;
    const void *meta;
    const char *text;
    uint32_t ranks;
    bool patches; /* whether ranks may make patches against the newest version */
};

/* The publisher takes a slot for all ranks; SHARED_NOTHING where none is free. */
enum shared_status publish_begin(struct pool *self, const struct version_facts *facts,
                               uint32_t *slot, uint64_t *sequence);
/* All pieces are there: readers get the version. digests: blocks whose digest lies in the slot. */
void publish_finish(struct pool *self, uint32_t slot, uint64_t sequence, uint32_t digests);
/* The version is given up; its slot is kept until nobody here can write it any more. */
void publish_give_up(struct pool *self);
void publish_let_go(struct pool *self, uint32_t slot);
void publish_count_skipped(struct pool *self);

/* A rank joins the version under way, if it has not written it; else SHARED_NOTHING. */
enum shared_status publish_join(struct pool *self, uint32_t *slot, struct slot_row *row);
/* Its piece is written, or fails the version; kept until nobody here can write it. */
void publish_piece_done(struct pool *self, uint64_t sequence);
void publish_piece_failed(struct pool *self, uint64_t sequence, const char *error);
void publish_piece_let_go(struct pool *self, uint32_t slot);
/* Whether a joined version became whole: OK, NOTHING for not yet, GONE if given up. */
enum shared_status publish_outcome(const struct pool *self, uint64_t sequence);

enum piece_state {
    PIECE_ABSENT = 0, /* the rank is not there, and has not begun */
    PIECE_AWAITED,
    PIECE_BEGUN,
    PIECE_DONE,
    PIECE_FAILED,
    PIECE_DEAD, /* it ended while it wrote */
};
/* How far a rank is with a version, as the publisher sees it. */
enum piece_state publish_piece_state(const struct pool *self, uint64_t sequence, uint32_t rank);

#endif
