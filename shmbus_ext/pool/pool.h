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
/* Makes a pool of a new, empty file: allocates the first slots and writes the tables, the magic
 * last. Takes fd over when it succeeds; pool_unmap in any case. */
enum shared_status pool_create(struct pool *self, int fd, const struct pool_geometry *plan);
/* Maps a pool and checks it. read_only: fd was opened so, nothing is ever written, and no slot is
 * mapped. Takes fd over when it succeeds. */
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

#endif
