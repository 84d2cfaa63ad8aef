/* CRC-32C by CPU instruction, or by table on a CPU without the instruction. Both give the same
 * value; the library chooses once, on load. */
#include "base/checksum.h"

#include <string.h>

#define POLYNOMIAL 0x82F63B78u

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
/* The instruction takes three cycles and starts one a cycle: three parallel lanes run three times
 * as fast as one, as long as the memory keeps up. */
#define LANE_BYTES ((size_t)4096)

/* The register after a lane of zeros, by byte and byte value. */
static uint32_t over_lane[4][256];

static uint32_t skip_lane(uint32_t crc) {
    return over_lane[0][crc & 0xFFu] ^ over_lane[1][crc >> 8 & 0xFFu] ^
           over_lane[2][crc >> 16 & 0xFFu] ^ over_lane[3][crc >> 24];
}

/* The register is linear: a byte's value equals the sum of its bits' values. */
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
#define WITH_CRC __attribute__((target("sse4.2")))
#define CRC_8 _mm_crc32_u64
#define CRC_4 _mm_crc32_u32
#define CRC_1 _mm_crc32_u8
typedef uint64_t crc_register;

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
#define CRC_8 __crc32cd
#define CRC_4 __crc32cw
#define CRC_1 __crc32cb
typedef uint32_t crc_register;

static int hardware_present(void) {
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#endif

#ifdef HAVE_HARDWARE
WITH_CRC static uint32_t crc_by_hardware(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *p = data;
    crc_register first = ~crc;
    for (; bytes >= 3 * LANE_BYTES; bytes -= 3 * LANE_BYTES, p += 3 * LANE_BYTES) {
        crc_register second = 0, third = 0;
        for (size_t i = 0; i < LANE_BYTES; i += 8) {
            first = CRC_8(first, word_at(p + i));
            second = CRC_8(second, word_at(p + i + LANE_BYTES));
            third = CRC_8(third, word_at(p + i + 2 * LANE_BYTES));
        }
        first = skip_lane(skip_lane((uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    for (; bytes >= 8; bytes -= 8, p += 8) {
        first = CRC_8(first, word_at(p));
    }
    uint32_t last = (uint32_t)first;
    if (bytes >= 4) {
        last = CRC_4(last, half_at(p));
        bytes -= 4, p += 4;
    }
    while (bytes--) {
        last = CRC_1(last, *p++);
    }
    return ~last;
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
    }
#endif
}

uint32_t shmbus_crc32c(uint32_t crc, const void *data, size_t bytes) {
    return chosen(crc, data, bytes);
}
