/* Elements of 1, 2 or 4 bytes: read, written, digested, and compared 64 at a time.
 *
 * The functions are inlined with a constant width into functions compiled for one instruction set.
 * Elements may be unaligned. */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_AVX2 1
#endif

#define INLINE static inline __attribute__((always_inline))

/* Digests an old element, independent of order: the odd factor keeps a single wrong element
 * visible. */
INLINE uint64_t mixed(uint32_t value, uint64_t at) {
    return (value + UINT64_C(0x9E3779B97F4A7C15)) * (2 * at + 1);
}

INLINE uint32_t load(const uint8_t *data, uint32_t at, const uint32_t width) {
    uint32_t value = 0;
    memcpy(&value, data + (uint64_t)at * width, width);
    return value;
}

INLINE void store(uint8_t *data, uint32_t at, uint32_t value, const uint32_t width) {
    memcpy(data + (uint64_t)at * width, &value, width);
}

/* Elements compared at a time. */
#define WORD_BITS 64u

/* Compares WORD_BITS elements: a bit for every difference. */
typedef uint64_t (*differ)(const uint8_t *one, const uint8_t *other, uint32_t width);

#if defined(__SSE2__)
INLINE __m128i at128(const uint8_t *data, uint32_t index) {
    return _mm_loadu_si128((const __m128i *)(const void *)data + index);
}

/* A bit for every equal element of 16. */
INLINE uint64_t equal16(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    __m128i equal[4];
    for (uint32_t i = 0; i < width; i++) {
        __m128i a = at128(one, i), b = at128(other, i);
        equal[i] = width == 1   ? _mm_cmpeq_epi8(a, b)
                   : width == 2 ? _mm_cmpeq_epi16(a, b)
                                : _mm_cmpeq_epi32(a, b);
    }
    if (width == 1) {
        return (uint32_t)_mm_movemask_epi8(equal[0]);
    }
    if (width == 2) {
        return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(equal[0], equal[1]));
    }
    return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(equal[0], equal[1]),
                                                       _mm_packs_epi32(equal[2], equal[3])));
}

INLINE uint64_t differ_sse2(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    uint64_t equal = 0;
    for (uint32_t i = 0; i < 4; i++) {
        equal |= equal16(one + i * 16 * width, other + i * 16 * width, width) << 16 * i;
    }
    return ~equal;
}
#define DIFFER differ_sse2
#else
INLINE uint64_t differ_plain(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    uint64_t bits = 0;
    if (memcmp(one, other, (size_t)64 * width) == 0) {
        return 0;
    }
    for (uint32_t i = 0; i < 64; i++) {
        bits |= (uint64_t)(load(one, i, width) != load(other, i, width)) << i;
    }
    return bits;
}
#define DIFFER differ_plain
#endif

#ifdef HAVE_AVX2
#define AVX2 __attribute__((target("avx2,bmi,popcnt")))

INLINE AVX2 __m256i at256(const uint8_t *data, uint32_t index) {
    return _mm256_loadu_si256((const __m256i *)(const void *)data + index);
}

/* A bit for every equal element of 32; packing works in halves, and a permutation restores the
 * order. */
INLINE AVX2 uint64_t equal32(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    __m256i equal[4];
    for (uint32_t i = 0; i < width; i++) {
        __m256i a = at256(one, i), b = at256(other, i);
        equal[i] = width == 1   ? _mm256_cmpeq_epi8(a, b)
                   : width == 2 ? _mm256_cmpeq_epi16(a, b)
                                : _mm256_cmpeq_epi32(a, b);
    }
    __m256i all = equal[0];
    if (width == 2) {
        all = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal[0], equal[1]), 0xD8);
    } else if (width == 4) {
        __m256i low = _mm256_packs_epi32(equal[0], equal[1]);
        __m256i high = _mm256_packs_epi32(equal[2], equal[3]);
        all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                          _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
    return (uint32_t)_mm256_movemask_epi8(all);
}

INLINE AVX2 uint64_t differ_avx2(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    return ~(equal32(one, other, width) |
             equal32(one + 32 * width, other + 32 * width, width) << 32);
}
#endif

/* The differing elements of a word, maybe the last and incomplete word. */
INLINE uint64_t differ_some(const uint8_t *now, const uint8_t *base, uint32_t elements,
                            const uint32_t width, differ differs) {
    uint64_t bits = 0;
    if (elements >= WORD_BITS) {
        return differs(now, base, width);
    }
    for (uint32_t i = 0; i < elements; i++) {
        bits |= (uint64_t)(load(now, i, width) != load(base, i, width)) << i;
    }
    return bits;
}

/* The index of the lowest bit; arbitrary for 0. */
INLINE uint32_t lowest(uint64_t bits) {
    return (uint32_t)__builtin_ctzll(bits | UINT64_C(1) << (WORD_BITS - 1));
}
