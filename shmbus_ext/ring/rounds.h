/* Numbers of rounds that producers get without thinking, each handed out once.
 *
 * Invariants:
 * - No number is handed out twice on a bus, whoever dies: one addition takes it.
 * - The first number is the time at which the bus was made, in microseconds. So a bus that takes the
 *   place of a removed one, whose workers may still be in a round of that one, begins above all of
 *   its numbers, unless more than a million were taken in each second of its life.
 * - A number is a valid round, whatever somebody has scribbled over the counter. */
#ifndef SHMBUS_RING_ROUNDS_H
#define SHMBUS_RING_ROUNDS_H

#include "layout.h"

static inline void rounds_begin(struct bus_header *header, uint64_t created_unix_ns) {
    atomic_store_explicit(&header->next_round, created_unix_ns / 1000, memory_order_relaxed);
}

/* Of a restored bus: no number of the one before comes again. */
static inline void rounds_resume(struct bus_header *header, uint64_t next) {
    uint64_t own = atomic_load_explicit(&header->next_round, memory_order_relaxed);
    atomic_store_explicit(&header->next_round, next > own ? next : own, memory_order_relaxed);
}

static inline int64_t shmbus_next_round(struct bus_header *header) {
    uint64_t taken = atomic_fetch_add_explicit(&header->next_round, 1, memory_order_relaxed);
    return (int64_t)(taken & (uint64_t)INT64_MAX);
}

#endif
