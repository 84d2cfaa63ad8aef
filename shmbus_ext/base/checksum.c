/* CRC-32C by carry-less products of vectors where the CPU has them, else by its own instruction, by
 * table elsewhere. All give the same value; the choice is made once, when the library is loaded. */
#include "base/checksum.h"

#include <string.h>

#define POLYNOMIAL 0x82F63B78u

uint32_t shmbus_crc32c_reference(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *p = data;
    crc = ~crc;
    while (bytes--) {
        crc ^= *p++;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ (POLYNOMIAL & (0u - (crc & 1u)));
        }
    }
    return ~crc;
}

static uint32_t table[256];

static uint32_t crc_by_table(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *p = data;
    crc = ~crc;
    while (bytes--) {
        crc = (crc >> 8) ^ table[(crc ^ *p++) & 0xFFu];
    }
    return ~crc;
}

#if defined(__x86_64__) || defined(__aarch64__)
/* The instruction takes three cycles and starts one a cycle: three lanes side by side run three
 * times as fast as one, as long as the memory does. */
#define LANE_BYTES ((size_t)4096)

/* What a register becomes over a lane of zeros, for each value of each of its bytes. */
static uint32_t over_lane[4][256];

static uint32_t skip_lane(uint32_t crc) {
    return over_lane[0][crc & 0xFFu] ^ over_lane[1][crc >> 8 & 0xFFu] ^
           over_lane[2][crc >> 16 & 0xFFu] ^ over_lane[3][crc >> 24];
}

/* The register is linear: a byte's value is the sum of its bits'. */
static void prepare_lanes(void) {
    for (unsigned bit = 0; bit < 32; bit++) {
        uint32_t crc = UINT32_C(1) << bit;
        for (size_t i = 0; i < LANE_BYTES; i++) {
            crc = (crc >> 8) ^ table[crc & 0xFFu];
        }
        over_lane[bit / 8][1u << bit % 8] = crc;
    }
    for (unsigned byte = 0; byte < 4; byte++) {
        for (unsigned value = 1; value < 256; value++) {
            unsigned lowest = value & (0u - value);
            over_lane[byte][value] =
                over_lane[byte][value ^ lowest] ^ over_lane[byte][lowest];
        }
    }
}

static inline uint64_t word_at(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

static inline uint32_t half_at(const unsigned char *p) {
    uint32_t half;
    memcpy(&half, p, 4);
    return half;
}
#endif

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HAVE_HARDWARE 1

__attribute__((target("sse4.2"))) static uint32_t crc_by_hardware(uint32_t crc, const void *data,
                                                                   size_t bytes) {
    const unsigned char *p = data;
    uint64_t c = ~crc;
    for (; bytes >= 3 * LANE_BYTES; bytes -= 3 * LANE_BYTES, p += 3 * LANE_BYTES) {
        uint64_t second = 0, third = 0;
        for (size_t i = 0; i < LANE_BYTES; i += 8) {
            c = _mm_crc32_u64(c, word_at(p + i));
            second = _mm_crc32_u64(second, word_at(p + i + LANE_BYTES));
            third = _mm_crc32_u64(third, word_at(p + i + 2 * LANE_BYTES));
        }
        c = skip_lane(skip_lane((uint32_t)c) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    for (; bytes >= 8; bytes -= 8, p += 8) {
        c = _mm_crc32_u64(c, word_at(p));
    }
    uint32_t c32 = (uint32_t)c;
    if (bytes >= 4) {
        c32 = _mm_crc32_u32(c32, half_at(p));
        bytes -= 4, p += 4;
    }
    while (bytes--) {
        c32 = _mm_crc32_u8(c32, *p++);
    }
    return ~c32;
}

/* Carry-less products of 64 bytes at a time are several times as fast as the instruction. */
#if __GNUC__ >= 10 || __clang_major__ >= 8
#include <immintrin.h>
#define HAVE_WIDE 1
#define WITH_WIDE __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))
#define WIDE_BYTES ((size_t)64)
#define WIDE_AT_ONCE ((size_t)4)
/* Below this the instruction is as fast. */
#define WIDE_FROM_BYTES ((size_t)512)

/* x to the power of so many bits + 32, and - 32, modulo the polynomial: its bits reversed, times x.
 * They carry what is 128 bits wide over that many bits. Gopal and others, "Fast CRC Computation for
 * Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009. */
struct fold {
    uint64_t low, high;
};
static const struct fold over_2048 = {0x0DCB17AA4, 0x0B9E02B86};
static const struct fold over_512 = {0x0740EEF02, 0x09E4ADDF8};
static const struct fold over_384 = {0x01C291D04, 0x1D82C63DA};
static const struct fold over_256 = {0x1384AA63A, 0x0BA4FC28E};
static const struct fold over_128 = {0x0F20C0DFE, 0x14CD00BD6};

WITH_WIDE static inline __m128i as_128(struct fold by) {
    return _mm_set_epi64x((long long)by.high, (long long)by.low);
}

WITH_WIDE static inline __m128i fold_128(__m128i a, struct fold by, __m128i onto) {
    const __m128i k = as_128(by);
    const __m128i products =
        _mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11));
    return _mm_xor_si128(products, onto);
}

WITH_WIDE static inline __m512i fold_512(__m512i a, __m512i k, __m512i onto) {
    const __m512i low = _mm512_clmulepi64_epi128(a, k, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(a, k, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96); /* the sum of all three */
}

WITH_WIDE static uint32_t crc_by_wide(uint32_t crc, const void *data, size_t bytes) {
    if (bytes < WIDE_FROM_BYTES) {
        return crc_by_hardware(crc, data, bytes);
    }
    const unsigned char *p = data;
    __m512i x[WIDE_AT_ONCE];
    for (size_t i = 0; i < WIDE_AT_ONCE; i++) {
        x[i] = _mm512_loadu_si512(p + i * WIDE_BYTES);
    }
    x[0] = _mm512_xor_si512(
        x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    p += WIDE_AT_ONCE * WIDE_BYTES;
    bytes -= WIDE_AT_ONCE * WIDE_BYTES;
    const __m512i far = _mm512_broadcast_i32x4(as_128(over_2048));
    for (; bytes >= WIDE_AT_ONCE * WIDE_BYTES; bytes -= WIDE_AT_ONCE * WIDE_BYTES) {
        for (size_t i = 0; i < WIDE_AT_ONCE; i++) {
            x[i] = fold_512(x[i], far, _mm512_loadu_si512(p + i * WIDE_BYTES));
        }
        p += WIDE_AT_ONCE * WIDE_BYTES;
    }
    const __m512i near = _mm512_broadcast_i32x4(as_128(over_512));
    __m512i all = x[0];
    for (size_t i = 1; i < WIDE_AT_ONCE; i++) {
        all = fold_512(all, near, x[i]);
    }
    __m128i sum = _mm512_extracti32x4_epi32(all, 3);
    sum = fold_128(_mm512_extracti32x4_epi32(all, 2), over_128, sum);
    sum = fold_128(_mm512_extracti32x4_epi32(all, 1), over_256, sum);
    sum = fold_128(_mm512_castsi512_si128(all), over_384, sum);
    /* What is left has the remainder of all before it. */
    uint64_t c = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(sum));
    c = _mm_crc32_u64(c, (uint64_t)_mm_extract_epi64(sum, 1));
    return crc_by_hardware(~(uint32_t)c, p, bytes);
}

static int wide_present(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul");
}
#endif

static int hardware_present(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
}

#elif defined(__aarch64__)
#include <sys/auxv.h>
#define HAVE_HARDWARE 1
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#if defined(__clang__)
#define WITH_CRC __attribute__((target("crc")))
#else
#define WITH_CRC __attribute__((target("+crc")))
#endif
#include <arm_acle.h>

WITH_CRC static uint32_t crc_by_hardware(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *p = data;
    uint32_t c = ~crc;
    for (; bytes >= 3 * LANE_BYTES; bytes -= 3 * LANE_BYTES, p += 3 * LANE_BYTES) {
        uint32_t second = 0, third = 0;
        for (size_t i = 0; i < LANE_BYTES; i += 8) {
            c = __crc32cd(c, word_at(p + i));
            second = __crc32cd(second, word_at(p + i + LANE_BYTES));
            third = __crc32cd(third, word_at(p + i + 2 * LANE_BYTES));
        }
        c = skip_lane(skip_lane(c) ^ second) ^ third;
    }
    for (; bytes >= 8; bytes -= 8, p += 8) {
        c = __crc32cd(c, word_at(p));
    }
    if (bytes >= 4) {
        c = __crc32cw(c, half_at(p));
        bytes -= 4, p += 4;
    }
    while (bytes--) {
        c = __crc32cb(c, *p++);
    }
    return ~c;
}

static int hardware_present(void) {
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#endif

static uint32_t (*chosen)(uint32_t, const void *, size_t) = crc_by_table;

__attribute__((constructor)) static void choose(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ (POLYNOMIAL & (0u - (crc & 1u)));
        }
        table[i] = crc;
    }
#ifdef HAVE_HARDWARE
    prepare_lanes();
    if (hardware_present()) {
        chosen = crc_by_hardware;
#ifdef HAVE_WIDE
        chosen = wide_present() ? crc_by_wide : chosen;
#endif
    }
#endif
}

uint32_t shmbus_crc32c(uint32_t crc, const void *data, size_t bytes) {
    return chosen(crc, data, bytes);
}
