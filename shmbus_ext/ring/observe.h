/* Notes for messages: figures of deliveries, waits, groups that ended early. */
#ifndef SHMBUS_RING_OBSERVE_H
#define SHMBUS_RING_OBSERVE_H

#include <stdbool.h>
#include <stdint.h>

#include "ring/segment.h"

/* ---- Counting what is delivered into the segment's histograms. Only the collector writes them. */
/* An ascending upper bound of a bucket. Versions, seconds, tokens, scores. */
double figure_bound(enum shmbus_figure figure, unsigned bucket);

/* A value that is not finite is not counted. */
void figure_count(struct delivery_figures *self, enum shmbus_figure figure, double value);

/* ---- The groups that ended last without all of their samples, so that who still works on one can stop.
 *
 * A group is known by a hash of its key: 64 bits, so that a wrong answer is not to be expected among
 * SHMBUS_CANCELLED of them.
 *
 * Invariant: the collector alone writes. An entry that is overwritten was the oldest. */
/* Of a group's key; the same in every process. Never 0. */
uint64_t group_key_hash(const char *id, uint32_t bytes, int64_t round, uint32_t split);

void cancelled_add(struct segment *segment, uint64_t key_hash);
bool cancelled_has(const struct segment *segment, uint64_t key_hash);

/* ---- How long whom has waited, for whoever looks at the bus.
 *
 * Invariant: a count only grows, and nothing reads it to decide anything. */
/* `slot` has waited so much longer; the collector's is max_producers. */
static inline void waits_add(struct segment *segment, uint32_t slot, enum shmbus_wait what,
                             uint64_t ns) {
    atomic_fetch_add_explicit(&segment->waits[slot].ns[what], ns, memory_order_relaxed);
}

/* ---- Samples that a worker took and did not make, and until when the worker rests. */
struct unmade {
    uint32_t given_back, failed;
    uint64_t rests_until_ns;
    char reason[SHMBUS_UNMADE_WORDS * sizeof(uint64_t)]; /* padded by NUL */
};

/* The slot's owner notes its state, and counts that many more samples given back. */
void unmade_note(struct segment *segment, uint32_t slot, uint32_t released,
                 const struct unmade *note);

#endif
