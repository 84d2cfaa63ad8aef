/* The changed elements of a piece and their new values: found, packed and applied in a single pass
 * over plain memory.
 *
 * A piece is `rows` rows of `row_bytes` bytes, `stride` bytes apart. A row is cut into blocks of 8
 * spans of 256 elements (the last block and the last span may be shorter). The stream of a piece
 * holds, for every block:
 *
 *   counts  a byte a span: 0 to 254 elements changed; 255: full values follow
 *   places  a byte for every changed element, relative to the span; not for spans of count 255
 *   values  new values, in the order of the elements
 *
 * Invariants: elements are compared bit by bit, to keep NaN and -0.0 exact. An input stream comes
 * from shared memory: every byte is read once, and checked before use as a bound; whatever the
 * stream contains, only the piece is written. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Elements addressed by a place byte. */
#define PATCH_SPAN 256u
/* Spans of a block, few enough to keep its elements in the nearest cache until packed. */
#define PATCH_BLOCK_SPANS 8u
/* A count that announces every element of the span, without places. */
#define PATCH_ALL 255u

struct patch_shape {
    uint64_t rows;
    uint64_t row_bytes;
    uint64_t stride;
    uint32_t width; /* bytes of an element: 1, 2 or 4; larger elements count as several of 4 */
};

/* An input stream. */
struct patch_in {
    const uint8_t *at;
    const uint8_t *end;
    uint64_t base_digest; /* of the old elements so far */
    bool damaged;         /* invalid stream */
};

/* An output stream. */
struct patch_out {
    uint8_t *at;
    const uint8_t *end;
    uint64_t base_digest;
    uint64_t changes;
    bool full; /* a block did not fit */
};

/* Brings the piece at `to` to the contiguous rows at `now`, and packs the differences from `base`.
 * With base == to, the streams of `links` are first applied to the piece in order, and only
 * differences are written; otherwise the whole piece is written. False if `out` is full or a link
 * is damaged: the piece at `to` then holds neither the old nor the new content. */
bool patch_encode(struct patch_out *out, const struct patch_shape *shape, const uint8_t *now,
                  const uint8_t *base, uint8_t *to, struct patch_in *chain, uint32_t links);
/* Applies a stream to a piece; false if damaged, with a partly changed piece. */
bool patch_apply(struct patch_in *in, const struct patch_shape *shape, uint8_t *to);
/* Copies contiguous rows into a piece. */
void patch_copy(const struct patch_shape *shape, const uint8_t *now, uint8_t *to);
