/* One element of a declared dtype: conversion of numbers to bytes, and back.
 *
 * Invariant: only rounding changes a number. Numbers outside of the dtype's range are refused. */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* The target dtypes of conversions. */
enum stored_kind {
    STORED_BOOL = 0,
    STORED_I8,
    STORED_U8,
    STORED_I16,
    STORED_U16,
    STORED_I32,
    STORED_U32,
    STORED_I64,
    STORED_U64,
    STORED_F32,
    STORED_F64,
    STORED_F16,
    STORED_BF16,
    STORED_OTHER, /* not a number: text, structs, foreign byte order */
};

static inline bool stored_is_float(enum stored_kind kind) {
    return kind >= STORED_F32 && kind <= STORED_BF16;
}

/* Masks accept bools; for other fields a bool is a mistake. */
static inline bool stored_takes_bool(enum stored_kind kind) {
    return kind == STORED_BOOL || kind == STORED_U8;
}

/* Rounded to nearest, ties to even, once, from the double itself; too large is infinite. */
static inline uint16_t half_of_double(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    if (isnan(value)) {
        return sign | 0x7E00;
    }
    if (size >= 65520.0) { /* halfway from the largest half to the next power of two */
        return sign | 0x7C00;
    }
    if (size < 0x1p-14) {
        return sign | (uint16_t)rint(size * 0x1p24);
    }
    int exponent;
    double mantissa = rint(frexp(size, &exponent) * 0x1p11); /* 1024 to 2048: may carry */
    return sign | (uint16_t)(((exponent + 14) << 10) + (int)mantissa - 1024);
}

static inline double double_of_half(uint16_t half) {
    int exponent = (half >> 10) & 31;
    double mantissa = half & 1023;
    double size = exponent == 31 ? (mantissa != 0 ? NAN : INFINITY)
                  : exponent == 0 ? mantissa * 0x1p-24
                                  : ldexp(1024 + mantissa, exponent - 25);
    return half & 0x8000 ? -size : size;
}

/* bfloat16: the upper half of a float, rounded to nearest, ties to even, like PyTorch. */
static inline uint16_t bfloat16_of_double(double value) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    if (isnan(value)) {
        return (uint16_t)((bits >> 16 & 0x8000) | 0x7FC0);
    }
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline double double_of_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float single;
    memcpy(&single, &bits, sizeof single);
    return single;
}

/* Stores into an integer or bool dtype; false if the number is out of range. */
static inline bool store_int(void *to, enum stored_kind kind, int64_t value) {
#define STORE(type, low, high)                                                                   \
    do {                                                                                         \
        type narrow = (type)value;                                                               \
        memcpy(to, &narrow, sizeof narrow);                                                      \
        return value >= (low) && value <= (high);                                                \
    } while (0)
    switch (kind) {
    case STORED_BOOL:
        STORE(uint8_t, 0, 1);
    case STORED_I8:
        STORE(int8_t, INT8_MIN, INT8_MAX);
    case STORED_U8:
        STORE(uint8_t, 0, UINT8_MAX);
    case STORED_I16:
        STORE(int16_t, INT16_MIN, INT16_MAX);
    case STORED_U16:
        STORE(uint16_t, 0, UINT16_MAX);
    case STORED_I32:
        STORE(int32_t, INT32_MIN, INT32_MAX);
    case STORED_U32:
        STORE(uint32_t, 0, UINT32_MAX);
    case STORED_I64:
        STORE(int64_t, INT64_MIN, INT64_MAX);
    case STORED_U64:
        STORE(uint64_t, 0, INT64_MAX);
    default:
        return false;
    }
#undef STORE
}

/* False if a finite number would become infinite. */
static inline bool store_double(void *to, enum stored_kind kind, double value) {
    bool finite = isfinite(value);
    if (kind == STORED_F64) {
        memcpy(to, &value, sizeof value);
        return true;
    }
    if (kind == STORED_F32) {
        float narrow = (float)value;
        memcpy(to, &narrow, sizeof narrow);
        return !finite || isfinite(narrow);
    }
    if (kind != STORED_F16 && kind != STORED_BF16) {
        return false;
    }
    uint16_t narrow = kind == STORED_F16 ? half_of_double(value) : bfloat16_of_double(value);
    uint16_t infinite = kind == STORED_F16 ? 0x7C00 : 0x7F80;
    memcpy(to, &narrow, sizeof narrow);
    return !finite || (narrow & infinite) != infinite;
}

/* Loads a float of any width. */
static inline double load_double(const void *from, enum stored_kind kind) {
    double wide = 0;
    float single;
    uint16_t half;
    switch (kind) {
    case STORED_F64:
        memcpy(&wide, from, sizeof wide);
        return wide;
    case STORED_F32:
        memcpy(&single, from, sizeof single);
        return single;
    default:
        memcpy(&half, from, sizeof half);
        return kind == STORED_F16 ? double_of_half(half) : double_of_bfloat16(half);
    }
}

/* Loads an integer or bool of any width; false above INT64_MAX. */
static inline bool load_int(const void *from, enum stored_kind kind, int64_t *value) {
#define LOAD(type)                                                                               \
    do {                                                                                         \
        type narrow;                                                                             \
        memcpy(&narrow, from, sizeof narrow);                                                    \
        *value = (int64_t)narrow;                                                                \
        return true;                                                                             \
    } while (0)
    switch (kind) {
    case STORED_BOOL:
    case STORED_U8:
        LOAD(uint8_t);
    case STORED_I8:
        LOAD(int8_t);
    case STORED_I16:
        LOAD(int16_t);
    case STORED_U16:
        LOAD(uint16_t);
    case STORED_I32:
        LOAD(int32_t);
    case STORED_U32:
        LOAD(uint32_t);
    case STORED_I64:
        LOAD(int64_t);
    default: {
        uint64_t wide;
        memcpy(&wide, from, sizeof wide);
        *value = (int64_t)wide;
        return wide <= INT64_MAX;
    }
    }
#undef LOAD
}
