/* The pool of extents: leased by producers with one compare-and-swap, freed by the reader.
 *
 * Invariants: the low half of a descriptor's word is 0 exactly while the extent is free, and only
 * the holder of slot i writes i + 1 into it. The generation grows with every release, so a link or
 * a compare-and-swap from an earlier lease fails. */
#ifndef SHMBUS_RING_EXTENTS_H
#define SHMBUS_RING_EXTENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"
#include "segment.h"

#define NO_EXTENT UINT32_MAX

static inline uint64_t link_make(uint32_t generation, uint32_t low) {
    return ((uint64_t)generation << 32) | low;
}
static inline uint32_t link_generation(uint64_t link) {
    return (uint32_t)(link >> 32);
}
static inline uint32_t link_low(uint64_t link) {
    return (uint32_t)link;
}

/* Leases span neighbouring extents for a slot; the index of the first, or NO_EXTENT. The lease has
 * no place in a lane yet: until extent_enter it is an orphan that recovery may free. */
uint32_t extent_lease(struct segment *segment, uint32_t slot, uint32_t span, uint32_t *generation);

/* Gives a lease its place in a lane. */
void extent_enter(struct segment *segment, uint32_t extent, uint32_t generation, uint32_t span,
                  uint64_t order, uint64_t producer_id);

/* Frees one extent if its word is still this one. At most one caller succeeds for a lease. */
bool extent_unlease(struct segment *segment, uint32_t extent, uint64_t word);

/* Keeps a lease and ends what it was entered as: no link to it holds any more. */
void extent_renew(struct segment *segment, uint32_t extent, uint64_t word);

/* Of a lease that this process holds. */
uint32_t extent_generation(const struct segment *segment, uint32_t extent);

struct run {
    uint32_t span;
    uint32_t generation;
    uint64_t order;
};

/* Whether `extent` heads a run that this slot has entered, within bounds. */
bool extent_is_run(const struct segment *segment, uint32_t extent, uint32_t slot, struct run *run);
/* The same for what a link names, generation included. */
bool link_is_run(const struct segment *segment, uint64_t link, uint32_t slot, struct run *run);

/* In ascending order. */
void extents_sort(uint32_t *extents, size_t count);

uint32_t extent_count_free(const struct segment *segment);

#endif
