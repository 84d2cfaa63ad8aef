/* The loops of batch/convert.h, in a form that compilers vectorise. */
#include "convert.h"

#include <string.h>

/* Wheels run on any x86-64: the loader picks the widest vectors of the machine. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&       \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WIDEST __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDEST
#endif

typedef void converter(void *restrict dst, const void *restrict src, uint64_t n);

#define CONVERT(name, from, to, expression)                                                        \
    WIDEST static void name(void *restrict target, const void *restrict source, uint64_t n) {     \
        to *restrict dst = target;                                                                 \
        const from *restrict src = source;                                                         \
        for (uint64_t i = 0; i < n; i++) {                                                         \
            dst[i] = (to)(expression);                                                             \
        }                                                                                          \
    }

CONVERT(i64_from_i8, int8_t, int64_t, src[i])
CONVERT(i64_from_u8, uint8_t, int64_t, src[i])
CONVERT(i64_from_i16, int16_t, int64_t, src[i])
CONVERT(i64_from_u16, uint16_t, int64_t, src[i])
CONVERT(i64_from_i32, int32_t, int64_t, src[i])
CONVERT(i64_from_u32, uint32_t, int64_t, src[i])
CONVERT(i64_from_64, uint64_t, int64_t, src[i])
CONVERT(f32_from_f64, double, float, src[i])
CONVERT(bool_from_8, uint8_t, uint8_t, src[i] != 0)
CONVERT(bool_from_16, uint16_t, uint8_t, src[i] != 0)
CONVERT(bool_from_32, uint32_t, uint8_t, src[i] != 0)
CONVERT(bool_from_64, uint64_t, uint8_t, src[i] != 0)
CONVERT(bool_from_f32, float, uint8_t, src[i] != 0)
CONVERT(bool_from_f64, double, uint8_t, src[i] != 0)

static converter *const to_i64[ELEMENT_OTHER] = {
    [ELEMENT_BOOL] = i64_from_u8, [ELEMENT_I8] = i64_from_i8,   [ELEMENT_U8] = i64_from_u8,
    [ELEMENT_I16] = i64_from_i16, [ELEMENT_U16] = i64_from_u16, [ELEMENT_I32] = i64_from_i32,
    [ELEMENT_U32] = i64_from_u32, [ELEMENT_I64] = i64_from_64,  [ELEMENT_U64] = i64_from_64,
};

static converter *const to_bool[ELEMENT_OTHER] = {
    [ELEMENT_BOOL] = bool_from_8, [ELEMENT_I8] = bool_from_8,   [ELEMENT_U8] = bool_from_8,
    [ELEMENT_I16] = bool_from_16, [ELEMENT_U16] = bool_from_16, [ELEMENT_I32] = bool_from_32,
    [ELEMENT_U32] = bool_from_32, [ELEMENT_I64] = bool_from_64, [ELEMENT_U64] = bool_from_64,
    [ELEMENT_F32] = bool_from_f32, [ELEMENT_F64] = bool_from_f64,
};

void gather_i64(int64_t *dst, const void *src, enum element_kind kind, uint64_t n) {
    to_i64[kind](dst, src, n);
}

void gather_bool(uint8_t *dst, const void *src, enum element_kind kind, uint64_t n) {
    to_bool[kind](dst, src, n);
}

void gather_f32(float *dst, const void *src, enum element_kind kind, uint64_t n) {
    if (kind == ELEMENT_F32) {
        memcpy(dst, src, n * 4);
    } else {
        f32_from_f64(dst, src, n);
    }
}

WIDEST void gather_positions(int64_t *dst, int64_t first, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        dst[i] = first + (int64_t)i;
    }
}

WIDEST void gather_fill_f32(float *dst, float value, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        dst[i] = value;
    }
}

/* Bits and not comparisons: they vectorise, and no compiler flag can argue them away. */
#define EXPONENT_F32 UINT32_C(0x7f800000)

/* Tokens per strip, whose columns are written before the next strip: a cache line of the mask.
 * Interleaved stores to five columns let memory work in parallel, unlike column after column. */
#define STRIP UINT64_C(64)

/* The bits of MAX_LOGPROB. no_logprob returns 1 for infinity, NaN and values above the bound. */
#define MAX_LOGPROB_BITS 0x3a800000
static inline __attribute__((always_inline)) uint32_t no_logprob(uint32_t bits) {
    return (uint32_t)((bits & EXPONENT_F32) == EXPONENT_F32) |
           (uint32_t)((int32_t)bits > MAX_LOGPROB_BITS);
}

/* Bits that a flag, 0 or 1, lacks. */
#define NO_FLAG_BITS 0xfeu

static inline __attribute__((always_inline)) uint32_t
gather_strip(const struct plain_tokens *of, uint64_t at, uint64_t n) {
    const uint8_t *restrict mask = of->mask + at;
    const uint8_t *restrict tokens = of->tokens + at * sizeof(int32_t);
    const uint8_t *restrict logprobs = of->logprobs + at * sizeof(float);
    int64_t *restrict to_tokens = of->to_tokens + at;
    int64_t *restrict to_positions = of->to_positions + at;
    uint8_t *restrict to_mask = of->to_mask + at;
    float *restrict to_logprobs = of->to_logprobs + at;
    float *restrict to_advantages = of->to_advantages + at;
    uint32_t wrong = 0;
    uint8_t masks = 0;
    for (uint64_t i = 0; i < n; i++) {
        int32_t token;
        memcpy(&token, tokens + i * sizeof token, sizeof token);
        to_tokens[i] = token;
    }
    for (uint64_t i = 0; i < n; i++) {
        to_positions[i] = of->first + (int64_t)(at + i);
    }
    for (uint64_t i = 0; i < n; i++) {
        masks |= mask[i];
        to_mask[i] = mask[i] != 0;
    }
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, logprobs + i * sizeof bits, sizeof bits);
        bits = mask[i] != 0 ? bits : 0;
        wrong |= no_logprob(bits);
        memcpy(&to_logprobs[i], &bits, sizeof bits);
    }
    for (uint64_t i = 0; i < n; i++) {
        to_advantages[i] = of->advantage;
    }
    return wrong | (masks & NO_FLAG_BITS);
}

WIDEST bool gather_plain(const struct plain_tokens *these, uint64_t n) {
    const struct plain_tokens of = *these; /* local copy: no store to a column changes the struct */
    uint32_t wrong = 0;
    uint64_t at = 0;
    for (; at + STRIP <= n; at += STRIP) {
        wrong |= gather_strip(&of, at, STRIP);
    }
    return (wrong | gather_strip(&of, at, n - at)) == 0;
}

WIDEST static bool any_beyond_i64(const uint64_t *values, uint64_t n) {
    uint64_t seen = 0;
    for (uint64_t i = 0; i < n; i++) {
        seen |= values[i];
    }
    return seen > (uint64_t)INT64_MAX;
}

uint64_t gather_find_beyond_i64(const uint64_t *values, uint64_t n) {
    if (!any_beyond_i64(values, n)) {
        return n;
    }
    uint64_t at = 0;
    while (values[at] <= (uint64_t)INT64_MAX) {
        at++;
    }
    return at;
}

WIDEST bool gather_finite_f32(float *dst, const uint8_t *mask, uint64_t n) {
    uint32_t wrong = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &dst[i], sizeof bits);
        const bool not_finite = (bits & EXPONENT_F32) == EXPONENT_F32;
        wrong |= (uint32_t)(not_finite && mask[i] != 0);
        dst[i] = not_finite && mask[i] == 0 ? 0.0f : dst[i];
    }
    return wrong == 0;
}

/* WRONG(value): zero for 0 and 1. In the element's own type, a vector holds the most elements. */
#define FLAGS_OF(name, type, found_type, WRONG)                                                  \
    WIDEST static bool any_no_flag_##name(const void *source, uint64_t n) {                      \
        const type *values = source;                                                             \
        found_type found = 0;                                                                    \
        for (uint64_t i = 0; i < n; i++) {                                                       \
            found = (found_type)(found | WRONG(values[i]));                                      \
        }                                                                                        \
        return found != 0;                                                                       \
    }
#define HIGH_BITS_8(value) ((uint8_t)((value) & NO_FLAG_BITS))
#define HIGH_BITS_16(value) ((uint16_t)((value) & 0xfffeu))
#define HIGH_BITS_32(value) ((value) & ~UINT32_C(1))
#define HIGH_BITS_64(value) ((value) & ~UINT64_C(1))
#define NEITHER(value) ((uint32_t)!((value) == 0 || (value) == 1))
FLAGS_OF(8, uint8_t, uint8_t, HIGH_BITS_8)
FLAGS_OF(16, uint16_t, uint16_t, HIGH_BITS_16)
FLAGS_OF(32, uint32_t, uint32_t, HIGH_BITS_32)
FLAGS_OF(64, uint64_t, uint64_t, HIGH_BITS_64)
FLAGS_OF(f32, float, uint32_t, NEITHER)
FLAGS_OF(f64, double, uint32_t, NEITHER)

static bool (*const any_no_flag[ELEMENT_OTHER])(const void *, uint64_t) = {
    [ELEMENT_BOOL] = any_no_flag_8, [ELEMENT_I8] = any_no_flag_8,   [ELEMENT_U8] = any_no_flag_8,
    [ELEMENT_I16] = any_no_flag_16, [ELEMENT_U16] = any_no_flag_16, [ELEMENT_I32] = any_no_flag_32,
    [ELEMENT_U32] = any_no_flag_32, [ELEMENT_I64] = any_no_flag_64, [ELEMENT_U64] = any_no_flag_64,
    [ELEMENT_F32] = any_no_flag_f32, [ELEMENT_F64] = any_no_flag_f64,
};

bool gather_any_no_flag(const void *values, enum element_kind kind, uint64_t n) {
    return any_no_flag[kind](values, n);
}

WIDEST bool gather_any_no_logprob(const float *values, uint64_t n) {
    uint32_t found = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        found |= no_logprob(bits);
    }
    return found != 0;
}

WIDEST void gather_mask_f32(float *dst, const uint8_t *mask, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        dst[i] = mask[i] ? dst[i] : 0.0f;
    }
}
