/* From records into contiguous batch memory: a trainer's conversions, in one pass.
 *
 * Invariant: these functions never allocate, check bounds or read shared control data; the caller
 * has proved n elements in src and room for them in dst. */
#pragma once

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

/* Integers and bools; floats; any number. The caller has checked the kind. */
void gather_i64(int64_t *dst, const void *src, enum element_kind kind, uint64_t n);
void gather_f32(float *dst, const void *src, enum element_kind kind, uint64_t n);
void gather_bool(uint8_t *dst, const void *src, enum element_kind kind, uint64_t n);

/* The columns of some tokens in the usual kinds: tokens of ELEMENT_I32, a mask of ELEMENT_BOOL, _I8
 * or _U8, and logprobs of ELEMENT_F32, with 0 for masked positions. Values equal the results of the
 * functions below. */
struct plain_tokens {
    const uint8_t *tokens, *mask, *logprobs;
    int64_t *to_tokens, *to_positions;
    uint8_t *to_mask;
    float *to_logprobs, *to_advantages;
    int64_t first; /* position */
    float advantage;
};
/* Returns true if the mask holds 0 and 1, and every logprob under the mask is finite and within the
 * bound. */
bool gather_plain(const struct plain_tokens *these, uint64_t n);

/* first, first + 1, ... */
void gather_positions(int64_t *dst, int64_t first, uint64_t n);
void gather_fill_f32(float *dst, float value, uint64_t n);
/* Selects 0 for a mask of 0, to remove any value, including NaN. */
void gather_mask_f32(float *dst, const uint8_t *mask, uint64_t n);

/* The index of the first value above the range of int64; n if every value fits. */
uint64_t gather_find_beyond_i64(const uint64_t *values, uint64_t n);

/* Replaces infinity and NaN by 0 for a mask of 0; returns true if every other value is finite. */
bool gather_finite_f32(float *dst, const uint8_t *mask, uint64_t n);
/* Returns true if a value differs from 0 and 1. */
bool gather_any_no_flag(const void *values, enum element_kind kind, uint64_t n);
/* Rounding may lift a logprob above 0, though not this far. */
#define MAX_LOGPROB 0x1p-10f
/* Returns true if a value is infinite, NaN or above the bound. */
bool gather_any_no_logprob(const float *values, uint64_t n);
