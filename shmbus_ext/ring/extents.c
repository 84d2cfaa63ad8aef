/* Leasing and freeing extents (see segment.h). */
#include "segment.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/failpoints.h"

/* How long a producer that waits for a run keeps single leases out of the upper half. */
#define JUMBO_CLAIM_NS UINT64_C(1000000000)

static bool lease_one(struct segment *segment, uint32_t extent, uint32_t slot) {
    _Atomic uint64_t *word = &segment->extents[extent].word;
    uint64_t seen = RELAXED(*word);
    /* SYNC: extent-freed. Acquire: after the reader's last access to the extent. */
    return link_low(seen) == 0 && EXCHANGE(*word, seen, seen | (slot + 1), memory_order_acquire);
}

bool extent_unlease(struct segment *segment, uint32_t extent, uint64_t word) {
    /* SYNC: extent-freed. */
    return EXCHANGE(segment->extents[extent].word, word, link_make(link_generation(word) + 1, 0),
                    memory_order_release);
}

void extent_renew(struct segment *segment, uint32_t extent, uint64_t word) {
    uint64_t renewed = link_make(link_generation(word) + 1, link_low(word));
    EXCHANGE(segment->extents[extent].word, word, renewed, memory_order_relaxed);
}

static uint64_t word_of(const struct segment *segment, uint32_t extent) {
    return RELAXED(segment->extents[extent].word);
}

uint32_t extent_generation(const struct segment *segment, uint32_t extent) {
    return link_generation(word_of(segment, extent));
}

/* Lowest extent first: a bus without backlog stays within a few cached extents. */
static uint32_t lease_single(struct segment *segment, uint32_t slot) {
    uint32_t end = segment->extent_count;
    uint64_t until = RELAXED(segment->header->jumbo_until_ns);
    if (until != 0) {
        /* A claim longer than JUMBO_CLAIM_NS comes from scribbled bytes or another clock. */
        uint64_t now = clock_monotonic_ns();
        if (until > now && until - now <= JUMBO_CLAIM_NS) {
            end = (end + 1) / 2;
        }
    }
    for (uint32_t i = 0; i < end; i++) {
        if (lease_one(segment, i, slot)) {
            return i;
        }
    }
    return NO_EXTENT;
}

static bool lease_window(struct segment *segment, uint32_t slot, uint32_t first, uint32_t span) {
    for (uint32_t i = 0; i < span; i++) {
        if (!lease_one(segment, first + i, slot)) {
            while (i-- > 0) {
                extent_unlease(segment, first + i, word_of(segment, first + i));
            }
            /* A producer may have seen a full bus while this call held the window. */
            bell_ring_for(&segment->header->space_bell, SPACE_FREED, span);
            return false;
        }
        FAILPOINT("lease-half");
    }
    return true;
}

/* Highest first, out of the way of single leases. */
static uint32_t lease_run(struct segment *segment, uint32_t slot, uint32_t span) {
    uint32_t have = 0;
    for (uint32_t i = segment->extent_count; i-- > 0;) {
        have = link_low(word_of(segment, i)) == 0 ? have + 1 : 0;
        if (have == span) {
            if (lease_window(segment, slot, i, span)) {
                return i;
            }
            have = 0;
        }
    }
    return NO_EXTENT;
}

uint32_t extent_lease(struct segment *segment, uint32_t slot, uint32_t span,
                      uint32_t *generation) {
    uint32_t extent =
        span == 1 ? lease_single(segment, slot) : lease_run(segment, slot, span);
    if (extent != NO_EXTENT) {
        *generation = extent_generation(segment, extent);
    } else if (span > 1) {
        /* Advisory and time-limited: a producer that stops here delays nobody for long. */
        SET_RELAXED(segment->header->jumbo_until_ns, clock_monotonic_ns() + JUMBO_CLAIM_NS);
    }
    return extent;
}

void extent_enter(struct segment *segment, uint32_t extent, uint32_t generation, uint32_t span,
                  uint64_t order, uint64_t producer_id) {
    struct extent_desc *desc = &segment->extents[extent];
    SET_RELAXED(desc->used, 0);
    SET_RELAXED(desc->sealed, 0);
    SET_RELAXED(desc->writer_pins, 0);
    SET_RELAXED(desc->next, link_make(generation, 0));
    SET_RELAXED(desc->producer_id, producer_id);
    SET_RELAXED(desc->order, order);
    /* SYNC: run-entered. A span of this generation proves the fields stored before. */
    SET_RELEASE(desc->span, link_make(generation, span));
}

bool extent_is_run(const struct segment *segment, uint32_t extent, uint32_t slot,
                   struct run *run) {
    const struct extent_desc *desc = &segment->extents[extent];
    uint64_t word = ACQUIRE(desc->word);
    /* SYNC: run-entered. */
    uint64_t span = ACQUIRE(desc->span);
    run->span = link_low(span);
    run->generation = link_generation(word);
    run->order = RELAXED(desc->order);
    return link_low(word) == slot + 1 && link_generation(span) == run->generation &&
           run->span >= 1 && run->span <= segment->max_span &&
           run->span <= segment->extent_count - extent;
}

bool link_is_run(const struct segment *segment, uint64_t link, uint32_t slot, struct run *run) {
    uint32_t low = link_low(link);
    return low != 0 && low <= segment->extent_count &&
           extent_is_run(segment, low - 1, slot, run) && run->generation == link_generation(link);
}

uint32_t extent_count_free(const struct segment *segment) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < segment->extent_count; i++) {
        count += link_low(word_of(segment, i)) == 0;
    }
    return count;
}

static int by_extent(const void *one, const void *other) {
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return (a > b) - (a < b);
}

void extents_sort(uint32_t *extents, size_t count) {
    qsort(extents, count, sizeof *extents, by_extent);
}
