/* Copying payload into the ring (see copy.h). */
#include "copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

#define LINE ((size_t)64)
/* A smaller copy reaches the reader's cache soon enough, and begins and ends in lines that are not
 * whole. */
#define WORTH_STREAMING_BYTES ((size_t)2048)

static void stream_line(uint8_t *to, const uint8_t *from) {
    __m128i part[LINE / sizeof(__m128i)];
    for (size_t i = 0; i < LINE / sizeof *part; i++) {
        part[i] = _mm_loadu_si128((const __m128i *)(const void *)from + i);
    }
    for (size_t i = 0; i < LINE / sizeof *part; i++) {
        _mm_stream_si128((__m128i *)(void *)to + i, part[i]);
    }
}

void copy_non_temporal(void *to, const void *from, size_t bytes) {
    if (bytes < WORTH_STREAMING_BYTES) {
        memcpy(to, from, bytes);
        return;
    }
    uint8_t *at = to;
    const uint8_t *source = from;
    size_t head = (LINE - (uintptr_t)at % LINE) % LINE;
    memcpy(at, source, head);
    size_t done = head;
    for (; done + LINE <= bytes; done += LINE) {
        stream_line(at + done, source + done);
    }
    memcpy(at + done, source + done, bytes - done);
}

void copy_fence(void) {
    /* SYNC: record-published. A release store does not order non-temporal stores without this. */
    _mm_sfence();
}

#else

void copy_non_temporal(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

void copy_fence(void) {}

#endif
