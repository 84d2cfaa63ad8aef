/* Which elements of a piece of a version changed, and to what: found, packed and applied in one
 * pass each, over plain memory.
 *
 * A piece is `rows` rows of `row_bytes` bytes, one each `stride` bytes. A row is cut into blocks of
 * 8 spans of 256 elements (the last of both may be shorter). A piece's stream has for each block:
 *
 *   counts  a byte a span: 0 to 254 elements changed; 255: all of them follow
 *   places  a byte each, in the span; of spans whose count is not 255
 *   values  new ones, in the order of the elements
 *
 * Invariants: elements are compared bit by bit, so that NaN and -0.0 are what they are. A stream
 * that is read comes from shared memory: each byte is read once, and checked before it bounds
 * anything; whatever it says, only the piece is written. */
#ifndef SHMBUS_POOL_PATCH_CODE_H
#define SHMBUS_POOL_PATCH_CODE_H

#include <stdbool.h>
#include <stdint.h>

/* Elements that a place byte can tell apart. */
#define PATCH_SPAN 256u
/* Spans of a block: its elements are still in the nearest cache when they are packed. */
#define PATCH_BLOCK_SPANS 8u
/* Instead of a count: every element follows, without its place. */
#define PATCH_ALL 255u

struct patch_shape {
    uint64_t rows;
    uint64_t row_bytes;
    uint64_t stride;
    uint32_t width; /* bytes of an element: 1, 2 or 4; larger ones are several of 4 */
};

/* A stream that is being read. */
struct patch_in {
    const uint8_t *at;
    const uint8_t *end;
    uint64_t base_digest; /* of the elements that were there before, so far */
    bool damaged;         /* it says what no stream says */
};

/* A stream that is being written. */
struct patch_out {
    uint8_t *at;
    const uint8_t *end;
    uint64_t base_digest;
    uint64_t changes;
    bool full; /* a block did not fit */
};

/* Bytes of a stream in which so many elements changed, at most. */
uint64_t patch_stream_bytes(const struct patch_shape *shape, uint64_t changes);

/* Brings the piece at `to` to `now`, whose rows lie one after the other, and packs what differs
 * from `base`. Where base is `to`, only what differs is written, after the streams of `links` have
 * been applied to it, the first one first; else all of `to` is. False where `out` is full or a link
 * is damaged: then the piece at `to` is neither. */
bool patch_encode(struct patch_out *out, const struct patch_shape *shape, const uint8_t *now,
                  const uint8_t *base, uint8_t *to, struct patch_in *chain, uint32_t links);
/* Applies a stream to a piece; false where it is damaged, and some of the piece may be changed. */
bool patch_apply(struct patch_in *in, const struct patch_shape *shape, uint8_t *to);
/* Lists what a stream writes: the number of each element, counted over rows that lie one after the
 * other, and its new value, in rising order; where most of a span changed, all of it. Their number,
 * or UINT64_MAX where it is damaged, or room is missing: twice what it changes is always room. */
uint64_t patch_list(struct patch_in *in, const struct patch_shape *shape, uint32_t *elements_at,
                    uint8_t *values, uint64_t room);
/* Copies rows that lie one after the other into a piece. */
void patch_copy(const struct patch_shape *shape, const uint8_t *now, uint8_t *to);

#endif
