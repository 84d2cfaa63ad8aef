/* Copying payload into the ring (see copy.h). */
#include "base/copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

#define LINE ((size_t)64)
/* A smaller copy reaches the reader's cache soon enough, and fills few whole lines. */
#define WORTH_STREAMING_BYTES ((size_t)2048)

/* Pages copied in parallel: better use of memory banks and of the hardware prefetcher, which stops
 * at a page's end, compared with one page after another. */
#define PAGE ((size_t)4096)
#define PAGES_AT_ONCE ((size_t)4)
/* Prefetch distance within a page. */
#define AHEAD (4 * LINE)

static void stream_line(uint8_t *to, const uint8_t *from) {
    __m128i part[LINE / sizeof(__m128i)];
    for (size_t i = 0; i < LINE / sizeof *part; i++) {
        part[i] = _mm_loadu_si128((const __m128i *)(const void *)from + i);
    }
    for (size_t i = 0; i < LINE / sizeof *part; i++) {
        _mm_stream_si128((__m128i *)(void *)to + i, part[i]);
    }
}

static void stream_pages(uint8_t *to, const uint8_t *from) {
    for (size_t at = 0; at < PAGE; at += LINE) {
        for (size_t page = 0; page < PAGES_AT_ONCE * PAGE; page += PAGE) {
            __builtin_prefetch(from + page + at + AHEAD);
            stream_line(to + page + at, from + page + at);
        }
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
    for (; done + PAGES_AT_ONCE * PAGE <= bytes; done += PAGES_AT_ONCE * PAGE) {
        stream_pages(at + done, source + done);
    }
    for (; done + LINE <= bytes; done += LINE) {
        stream_line(at + done, source + done);
    }
    memcpy(at + done, source + done, bytes - done);
}

void copy_fence(void) {
    /* SYNC: record-published. A release store alone does not order non-temporal stores. */
    _mm_sfence();
}

#else

void copy_non_temporal(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

void copy_fence(void) {}

#endif
