/* Patches of versions: the changes since the previous version, stored beside the whole version in
 * the same slot.
 *
 * A rank makes the patch of its own pieces, in its share of the slot's patch bytes. A version gets
 * a patch only if every rank has made its patch against the same base.
 *
 * Invariants: a patch is a shortcut, never the only way: the slot holds the whole version, leased
 * during a read of either. A piece in the slot equals the publisher's piece, whatever happens to
 * its patch. Values from a patch are checked before they bound an access. */
#pragma once

#include "pool/patch_code.h"
#include "pool/pool.h"

/* Most patches from a slot's old version to the base: the publications between two writes of the
 * slot. */
#define PATCH_MAX_LINKS (POOL_MAX_SLOTS - 1u)

/* A rank's checked patch in a slot: runs lie in [runs, end). */
struct patch_view {
    const uint8_t *runs;
    const uint8_t *end;
    uint64_t changes;
    uint32_t count;
};

/* A patch under construction in this process. */
struct patch_maker {
    struct pool *pool;
    uint32_t slot;
    uint64_t sequence;
    uint64_t base_sequence;
    const uint8_t *base; /* payload of the previous version; NULL: no patch */
    struct patch_head *head;
    uint8_t *at;
    const uint8_t *end;
    uint32_t runs;
    uint64_t changes;
    /* Patches from the slot's own bytes to the base, oldest first. */
    uint32_t links;
    bool caught_up; /* the chain leads from the slot's bytes to the base */
    struct patch_view chain[PATCH_MAX_LINKS];
    const uint8_t *next[PATCH_MAX_LINKS]; /* start of the search for the next piece's run */
};

enum patch_put {
    PATCH_WHOLE = 0, /* the piece is written, and the version gets no patch */
    PATCH_MADE,
};

/* Begins this process's patch of a version during its write, if possible. */
void patch_begin(struct patch_maker *maker, struct pool *pool, uint32_t slot);
/* Writes a piece with contiguous rows at `now` into the slot; `changes` receives the number of
 * changed elements, if a patch was made. The piece lies inside the version. */
enum patch_put patch_put(struct patch_maker *maker, uint64_t offset,
                         const struct patch_shape *shape, const uint8_t *now, uint64_t *changes);
/* Writes a piece by a run of another pool's patch, made against the same base, and copies the run
 * into this patch. False without a base, without room, or for a different base: the piece then
 * holds neither the old nor the new content. The caller has checked the run's bounds against the
 * version. */
bool patch_put_run(struct patch_maker *maker, const struct patch_run *run, const uint8_t *stream);
/* Abandons the patch; later pieces are written whole. */
void patch_give_up(struct patch_maker *maker);
/* Completes the patch: readers may use the patch once the version is whole. */
void patch_seal(struct patch_maker *maker);
/* For the publisher, at the end: true if every rank has made its patch; otherwise the version gets
 * no patch. */
bool patch_settle(struct pool *pool, uint32_t slot, uint64_t sequence);

/* Finds a rank's patch of a leased version; row holds a checked copy. False without a patch. */
bool patch_find(const struct pool *pool, uint32_t slot, const struct slot_row *row, uint32_t rank,
                struct patch_view *view);
/* Reads the run at *at and advances; false at the end, or at invalid bytes. */
bool patch_next(const struct patch_view *view, const uint8_t **at, struct patch_run *run,
                const uint8_t **stream);
/* Extends a checksum by the rows of a piece, from `payload`. */
uint32_t patch_piece_crc(uint32_t crc, const struct patch_run *run, const uint8_t *payload);
/* Checks that a piece lies within `bytes`, in whole elements of its width. */
bool patch_fits(uint64_t offset, const struct patch_shape *shape, uint64_t bytes);
