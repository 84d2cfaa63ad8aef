/* From records into contiguous batch memory: the conversions that a trainer needs, one pass each.
 *
 * Invariant: no function here allocates, checks bounds or reads shared control data; the caller has
 * proved that src has n elements and dst room for them. */
#ifndef SHMBUS_BATCH_CONVERT_H
#define SHMBUS_BATCH_CONVERT_H

#include <stdbool.h>
#include <stdint.h>

enum element_kind {
    ELEMENT_BOOL = 0,
    ELEMENT_I8,
    ELEMENT_U8,
    ELEMENT_I16,
    ELEMENT_U16,
    ELEMENT_I32,
    ELEMENT_U32,
    ELEMENT_I64,
    ELEMENT_U64,
    ELEMENT_F32,
    ELEMENT_F64,
    ELEMENT_OTHER,
};

/* False for a kind that has no such conversion. */
bool gather_i64(int64_t *dst, const void *src, enum element_kind kind, uint64_t n);
bool gather_f32(float *dst, const void *src, enum element_kind kind, uint64_t n);
bool gather_bool(uint8_t *dst, const void *src, enum element_kind kind, uint64_t n);

/* All columns of some tokens of the kinds that almost every record has: tokens of ELEMENT_I32, a
 * mask of ELEMENT_BOOL, _I8 or _U8, and logprobs of ELEMENT_F32 that are 0 where the mask is. Each
 * value is what the functions below make of it. */
struct plain_tokens {
    const uint8_t *tokens, *mask, *logprobs;
    int64_t *to_tokens, *to_positions;
    uint8_t *to_mask;
    float *to_logprobs, *to_advantages;
    int64_t first; /* position */
    float advantage;
};
/* Whether all logprobs that are left are finite, and within the bound. */
bool gather_plain(const struct plain_tokens *these, uint64_t n);

/* first, first + 1, ... */
void gather_positions(int64_t *dst, int64_t first, uint64_t n);
void gather_fill_f32(float *dst, float value, uint64_t n);
/* 0 where the mask is 0, by selection: any value that stood there, a NaN too, is gone. */
void gather_mask_f32(float *dst, const uint8_t *mask, uint64_t n);

/* The position of the first that an int64 cannot hold; n where there is none. */
uint64_t gather_find_beyond_i64(const uint64_t *values, uint64_t n);

bool gather_any_not_finite(const float *values, uint64_t n);
/* The position of the first nan or infinity; n where there is none. */
uint64_t gather_find_not_finite(const float *values, uint64_t n);
/* The position of the first that is neither 0 nor 1; n where there is none. */
uint64_t gather_find_no_flag(const void *values, enum element_kind kind, uint64_t n);
/* Rounding may bring a logprob above 0, though not this far. */
#define MAX_LOGPROB 0x1p-10f
/* Whether one is not finite, or above the bound. */
bool gather_any_no_logprob(const float *values, uint64_t n);

#endif
