/* Patches of versions: what changed since the version before, beside the whole, in the same slot.
 *
 * Each rank makes the patch of its own pieces, in its share of the slot's patch bytes. A version
 * has a patch where all ranks have made theirs against the same base.
 *
 * Invariants: a patch is a shortcut, and never the only way: the whole version is in the slot, which
 * is leased as long as either is read. A piece in the slot is what the publisher gave, whatever
 * became of its patch. Everything that is read of a patch is checked before it bounds an access. */
#ifndef SHMBUS_POOL_PATCH_H
#define SHMBUS_POOL_PATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "pool/patch_code.h"
#include "pool/pool.h"

/* Patches of one slot, from its base on: as many as lie between two publications into it. */
#define PATCH_MAX_LINKS (POOL_MAX_SLOTS - 1u)

/* A rank's patch in a slot, as it was checked: runs lie in [runs, end). */
struct patch_view {
    const uint8_t *runs;
    const uint8_t *end;
    uint64_t changes;
    uint32_t count;
};

/* A patch that is being made by this process. */
struct patch_maker {
    struct pool *pool;
    uint32_t slot;
    uint64_t sequence;
    uint64_t base_sequence;
    const uint8_t *base; /* payload of the version before; NULL where no patch is made */
    struct patch_head *head;
    uint8_t *at;
    const uint8_t *end;
    uint32_t runs;
    uint64_t changes;
    /* Patches that bring the slot's own bytes to the base, the first one first. */
    uint32_t links;
    bool caught_up; /* whether the slot's bytes can be brought to the base at all */
    struct patch_view chain[PATCH_MAX_LINKS];
    const uint8_t *next[PATCH_MAX_LINKS]; /* where the next piece's run is looked for first */
};

enum patch_put {
    PATCH_WHOLE = 0, /* the piece is written, and the version has no patch */
    PATCH_MADE,
};

/* Begins this process's patch of a version that is being written, if there may be one. */
void patch_begin(struct patch_maker *maker, struct pool *pool, uint32_t slot);
/* Writes a piece, whose rows lie one after the other at `now`, into the slot; `changes` is how many
 * elements of it changed, where a patch was made. The piece lies inside the version. */
enum patch_put patch_put(struct patch_maker *maker, uint64_t offset,
                         const struct patch_shape *shape, const uint8_t *now, uint64_t *changes);
/* Writes a piece by a run of another pool's patch, made against the same base, and takes that run over
 * into this patch. False where there is no base or no room, or the base is another one: the piece
 * is then neither. The run was checked to lie inside the version. */
bool patch_put_run(struct patch_maker *maker, const struct patch_run *run, const uint8_t *stream);
/* No patch any more; pieces are written whole. */
void patch_give_up(struct patch_maker *maker);
/* All pieces are there: others may read the patch once the version is whole. */
void patch_seal(struct patch_maker *maker);
/* In the publisher, at the end: whether all ranks have made their patches, or none has. */
bool patch_settle(struct pool *pool, uint32_t slot, uint64_t sequence);

/* A rank's patch of a version that is leased; row is a checked copy. False where there is none. */
bool patch_find(const struct pool *pool, uint32_t slot, const struct slot_row *row, uint32_t rank,
                struct patch_view *view);
/* The run at *at, which moves on; false at the end, or where what follows is none. */
bool patch_next(const struct patch_view *view, const uint8_t **at, struct patch_run *run,
                const uint8_t **stream);
/* Extends a checksum by the rows of a piece, from `payload`. */
uint32_t patch_piece_crc(uint32_t crc, const struct patch_run *run, const uint8_t *payload);
/* Whether a piece lies in so many bytes, in elements of its width. */
bool patch_fits(uint64_t offset, const struct patch_shape *shape, uint64_t bytes);

#endif
