/* CRC-32C by the CPU's own instruction where it has one, by table elsewhere. All give the same
 * value; the choice is made once, when the library is loaded. */
#include "checksum.h"

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

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HAVE_HARDWARE 1

__attribute__((target("sse4.2"))) static uint32_t crc_by_hardware(uint32_t crc, const void *data,
                                                                   size_t bytes) {
    const unsigned char *p = data;
    uint64_t c = ~crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = _mm_crc32_u64(c, word);
    }
    uint32_t c32 = (uint32_t)c;
    while (bytes--) {
        c32 = _mm_crc32_u8(c32, *p++);
    }
    return ~c32;
}

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
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = __crc32cd(c, word);
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
    if (hardware_present()) {
        chosen = crc_by_hardware;
    }
#endif
}

uint32_t shmbus_crc32c(uint32_t crc, const void *data, size_t bytes) {
    return chosen(crc, data, bytes);
}
