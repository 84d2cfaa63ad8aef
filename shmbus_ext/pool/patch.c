/* Making, finding and checking patches in slots (see patch.h). */
#define _GNU_SOURCE
#include "pool/patch.h"

#include <string.h>

#include "base/checksum.h"
#include "base/copy.h"
#include "base/failpoints.h"

static struct patch_head *head_of(const struct pool *pool, uint32_t slot, uint32_t ranks,
                                  uint32_t rank) {
    uint8_t *at = pool_patches(pool, slot) + rank * pool_patch_share(pool, ranks);
    return (struct patch_head *)(void *)at;
}

static uint32_t crc_of(const struct patch_head *head, const uint8_t *runs) {
    return shmbus_crc32c(shmbus_crc32c(0, head, PATCH_HEAD_CRC_TO), runs, head->bytes);
}

bool patch_fits(uint64_t offset, const struct patch_shape *shape, uint64_t bytes) {
    uint32_t width = shape->width;
    if ((width != 1 && width != 2 && width != 4) || shape->rows < 1 || shape->row_bytes < 1 ||
        shape->row_bytes % width != 0 || offset > bytes || shape->row_bytes > bytes - offset ||
        (shape->rows > 1 && shape->stride < shape->row_bytes)) {
        return false;
    }
    uint64_t left = bytes - offset - shape->row_bytes;
    return shape->rows == 1 || (shape->stride > 0 && shape->rows - 1 <= left / shape->stride);
}

/* Finds a rank's patch of a version and checks its head against its bytes. */
static bool view_of(const struct pool *pool, uint32_t slot, const struct slot_row *row,
                    uint32_t rank, struct patch_view *view) {
    uint64_t share = pool_patch_share(pool, row->ranks);
    if (row->base_sequence == 0 || share < sizeof(struct patch_head)) {
        return false;
    }
    const struct patch_head *shared = head_of(pool, slot, row->ranks, rank);
    const uint8_t *runs = (const uint8_t *)shared + sizeof *shared;
    struct patch_head head;
    memcpy(&head, shared, sizeof head); /* check and use the copy */
    if (head.sequence != row->sequence || head.base_sequence != row->base_sequence ||
        head.bytes > share - sizeof head || head.crc != crc_of(&head, runs)) {
        return false;
    }
    *view = (struct patch_view){runs, runs + head.bytes, head.changes, head.runs};
    return true;
}

bool patch_find(const struct pool *pool, uint32_t slot, const struct slot_row *row, uint32_t rank,
                struct patch_view *view) {
    return rank < row->ranks && view_of(pool, slot, row, rank, view);
}

bool patch_next(const struct patch_view *view, const uint8_t **at, struct patch_run *run,
                const uint8_t **stream) {
    if ((uint64_t)(view->end - *at) < sizeof *run) {
        return false;
    }
    memcpy(run, *at, sizeof *run);
    *stream = *at + sizeof *run;
    uint64_t left = (uint64_t)(view->end - *stream);
    if (run->bytes > left || pool_align_up(run->bytes, 8) > left) {
        return false;
    }
    *at = *stream + pool_align_up(run->bytes, 8);
    return true;
}

/* The slot of a whole version patched from `base`; max_slots without such a slot. */
static uint32_t slot_after(const struct pool *pool, uint64_t base, uint32_t ranks,
                           struct slot_row *row) {
    for (uint32_t at = 0; at < pool->max_slots; at++) {
        if (lease_peek(pool, at, row) && row->base_sequence == base && row->ranks == ranks) {
            return at;
        }
    }
    return pool->max_slots;
}

/* Finds the patches from the slot's version to the base. */
static void find_chain(struct patch_maker *maker, uint64_t kept, uint32_t ranks, uint32_t rank) {
    while (kept != maker->base_sequence) {
        struct slot_row row;
        uint32_t at = slot_after(maker->pool, kept, ranks, &row);
        struct patch_view *view = &maker->chain[maker->links];
        if (at >= maker->pool->max_slots || maker->links == PATCH_MAX_LINKS ||
            !view_of(maker->pool, at, &row, rank, view)) {
            return;
        }
        maker->next[maker->links++] = view->runs;
        kept = row.sequence;
    }
    maker->caught_up = true;
}

void patch_begin(struct patch_maker *maker, struct pool *pool, uint32_t slot) {
    const struct slot_row *row = &pool->slot_rows[slot];
    uint32_t ranks = row->ranks, rank = (uint32_t)pool->rank;
    uint64_t kept = row->kept_sequence;
    memset(maker, 0, sizeof *maker);
    maker->pool = pool;
    maker->slot = slot;
    maker->sequence = row->sequence;
    maker->base_sequence = row->base_sequence;
    if (ranks < 1 || ranks > POOL_MAX_RANKS || rank >= ranks || maker->base_sequence == 0 ||
        pool_patch_share(pool, ranks) <= sizeof(struct patch_head)) {
        return;
    }
    maker->head = head_of(pool, slot, ranks, rank);
    maker->at = (uint8_t *)maker->head + sizeof *maker->head;
    maker->end = (uint8_t *)maker->head + pool_patch_share(pool, ranks);
    /* Invalidate the patch of an earlier version. */
    maker->head->sequence = 0;
    for (uint32_t at = 0; at < pool->max_slots; at++) {
        struct slot_row found;
        if (at != slot && lease_peek(pool, at, &found) &&
            found.sequence == maker->base_sequence) {
            maker->base = pool_payload(pool, at);
        }
    }
    if (maker->base != NULL && kept != 0) {
        find_chain(maker, kept, ranks, rank);
    }
}

void patch_give_up(struct patch_maker *maker) {
    maker->base = NULL;
}

static bool is_piece(const struct patch_run *run, uint64_t offset,
                     const struct patch_shape *shape) {
    return run->offset == offset && run->rows == shape->rows &&
           run->row_bytes == shape->row_bytes && run->stride == shape->stride &&
           run->width == shape->width;
}

/* The piece's run in a patch: usually the run after the last match. */
static bool find_run(const struct patch_view *view, const uint8_t **next, uint64_t offset,
                     const struct patch_shape *shape, struct patch_run *run,
                     const uint8_t **stream) {
    const uint8_t *at = *next;
    for (int turn = 0; turn < 2; turn++, at = view->runs) {
        while (patch_next(view, &at, run, stream)) {
            if (is_piece(run, offset, shape)) {
                *next = at;
                return true;
            }
        }
    }
    return false;
}

/* Collects the streams from the slot's piece to the base. */
static bool links_of(struct patch_maker *maker, uint64_t offset, const struct patch_shape *shape,
                     struct patch_in *streams, uint64_t *digests) {
    for (uint32_t i = 0; i < maker->links; i++) {
        struct patch_run run;
        const uint8_t *stream;
        if (!find_run(&maker->chain[i], &maker->next[i], offset, shape, &run, &stream)) {
            return false;
        }
        streams[i] = (struct patch_in){.at = stream, .end = stream + run.bytes};
        digests[i] = run.base_digest;
    }
    return maker->caught_up;
}

/* Catches the slot up and compares in one pass; false for a different base, or a full patch. */
static bool put_in_place(struct patch_maker *maker, uint64_t offset,
                         const struct patch_shape *shape, const uint8_t *now,
                         struct patch_out *out) {
    struct patch_in streams[PATCH_MAX_LINKS];
    uint64_t digests[PATCH_MAX_LINKS];
    uint8_t *to = pool_payload(maker->pool, maker->slot) + offset;
    if (!links_of(maker, offset, shape, streams, digests) ||
        !patch_encode(out, shape, now, to, to, streams, maker->links)) {
        return false;
    }
    for (uint32_t i = 0; i < maker->links; i++) {
        if (streams[i].base_digest != digests[i] || streams[i].at != streams[i].end) {
            return false;
        }
    }
    return true;
}

enum patch_put patch_put(struct patch_maker *maker, uint64_t offset,
                         const struct patch_shape *shape, const uint8_t *now, uint64_t *changes) {
    uint8_t *to = pool_payload(maker->pool, maker->slot) + offset;
    struct patch_run run = {.offset = offset,
                            .rows = shape->rows,
                            .row_bytes = shape->row_bytes,
                            .stride = shape->stride,
                            .width = shape->width};
    *changes = 0;
    if (maker->base == NULL ||
        (uint64_t)(maker->end - maker->at) < sizeof run + sizeof(uint64_t)) {
        patch_give_up(maker);
        patch_copy(shape, now, to);
        return PATCH_WHOLE;
    }
    /* Reserve room for the padding. */
    struct patch_out begun = {.at = maker->at + sizeof run, .end = maker->end - sizeof(uint64_t)};
    struct patch_out out = begun;
    bool made = put_in_place(maker, offset, shape, now, &out);
    FAILPOINT("pool-patch-piece");
    if (!made && !out.full) {
        /* Not in place: also reads the base, and writes the whole piece. */
        out = begun;
        made = patch_encode(&out, shape, now, maker->base + offset, to, NULL, 0);
    }
    if (!made) {
        patch_give_up(maker);
        patch_copy(shape, now, to);
        return PATCH_WHOLE;
    }
    run.bytes = (uint64_t)(out.at - begun.at);
    run.changes = *changes = out.changes;
    run.base_digest = out.base_digest;
    memcpy(maker->at, &run, sizeof run);
    uint64_t padding = pool_align_up(run.bytes, 8) - run.bytes;
    memset(out.at, 0, padding);
    maker->at = out.at + padding;
    maker->runs++;
    maker->changes += out.changes;
    return PATCH_MADE;
}

/* Applies a stream to the piece at `to`; false if the stream belongs to different bytes. */
static bool apply_checked(const struct patch_shape *shape, struct patch_in in, uint64_t digest,
                          uint8_t *to) {
    return patch_apply(&in, shape, to) && in.at == in.end && in.base_digest == digest;
}

/* Brings the slot's piece to the base by the patches of the versions between. */
static bool catch_up(struct patch_maker *maker, uint64_t offset, const struct patch_shape *shape,
                     uint8_t *to) {
    struct patch_in streams[PATCH_MAX_LINKS];
    uint64_t digests[PATCH_MAX_LINKS];
    if (!links_of(maker, offset, shape, streams, digests)) {
        return false;
    }
    for (uint32_t i = 0; i < maker->links; i++) {
        if (!apply_checked(shape, streams[i], digests[i], to)) {
            return false;
        }
    }
    return true;
}

static void copy_base(const struct patch_shape *shape, const uint8_t *base, uint8_t *to) {
    for (uint64_t row = 0; row < shape->rows; row++) {
        copy_non_temporal(to + row * shape->stride, base + row * shape->stride,
                          (size_t)shape->row_bytes);
    }
    copy_fence();
}

bool patch_put_run(struct patch_maker *maker, const struct patch_run *run, const uint8_t *stream) {
    uint64_t padded = pool_align_up(run->bytes, 8);
    if (maker->base == NULL || (uint64_t)(maker->end - maker->at) < sizeof *run + padded) {
        return false;
    }
    struct patch_shape shape = {run->rows, run->row_bytes, run->stride, run->width};
    struct patch_in in = {.at = stream, .end = stream + run->bytes};
    uint8_t *to = pool_payload(maker->pool, maker->slot) + run->offset;
    if (!catch_up(maker, run->offset, &shape, to) ||
        !apply_checked(&shape, in, run->base_digest, to)) {
        copy_base(&shape, maker->base + run->offset, to);
        if (!apply_checked(&shape, in, run->base_digest, to)) {
            return false;
        }
    }
    memcpy(maker->at, run, sizeof *run);
    memcpy(maker->at + sizeof *run, stream, padded);
    maker->at += sizeof *run + padded;
    maker->runs++;
    maker->changes += run->changes;
    return true;
}

uint32_t patch_piece_crc(uint32_t crc, const struct patch_run *run, const uint8_t *payload) {
    for (uint64_t row = 0; row < run->rows; row++) {
        crc = shmbus_crc32c(crc, payload + run->offset + row * run->stride, run->row_bytes);
    }
    return crc;
}

void patch_seal(struct patch_maker *maker) {
    if (maker->base == NULL) {
        return;
    }
    const uint8_t *runs = (const uint8_t *)maker->head + sizeof *maker->head;
    struct patch_head head = {.sequence = maker->sequence,
                              .base_sequence = maker->base_sequence,
                              .bytes = (uint64_t)(maker->at - runs),
                              .changes = maker->changes,
                              .runs = maker->runs};
    head.crc = crc_of(&head, runs);
    memcpy(maker->head, &head, sizeof head);
    FAILPOINT("pool-patch-sealed");
}

bool patch_settle(struct pool *pool, uint32_t slot, uint64_t sequence) {
    struct slot_row *row = &pool->slot_rows[slot];
    uint64_t base = row->base_sequence;
    uint32_t ranks = row->ranks;
    bool made = base != 0 && ranks >= 1 && ranks <= POOL_MAX_RANKS &&
                pool_patch_share(pool, ranks) > sizeof(struct patch_head);
    for (uint32_t rank = 0; made && rank < ranks; rank++) {
        const struct patch_head *head = head_of(pool, slot, ranks, rank);
        made = head->sequence == sequence && head->base_sequence == base;
    }
    row->base_sequence = made ? base : 0;
    return made;
}
