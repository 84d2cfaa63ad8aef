/* Notes for messages: figures of deliveries, waits, groups that ended early. */
#pragma once

#include "ring/segment.h"

/* ---- Counting deliveries into the segment's histograms. Only the collector writes them. */
/* An ascending upper bound of a bucket. Versions, seconds, tokens, scores. */
double figure_bound(enum shmbus_figure figure, unsigned bucket);

/* Ignores infinite and NaN values. */
void figure_count(struct delivery_figures *self, enum shmbus_figure figure, double value);

/* ---- The last groups that ended early without every sample, as a stop signal to their workers.
 *
 * A 64-bit hash of its key identifies a group: a false match among SHMBUS_CANCELLED groups stays
 * improbable.
 *
 * Invariant: only the collector writes. A new entry overwrites the oldest. */
/* Of a group's key; the same in every process. Never 0. */
uint64_t group_key_hash(const char *id, uint32_t bytes, int64_t round, uint32_t split);

void cancelled_add(struct segment *segment, uint64_t key_hash);
bool cancelled_has(const struct segment *segment, uint64_t key_hash);

/* ---- Waiting time by slot and reason, for monitors of the bus.
 *
 * Invariant: a count only grows, and no decision reads a count. */
/* Adds waiting time to `slot`; the collector's slot number equals max_producers. */
static inline void waits_add(struct segment *segment, uint32_t slot, enum shmbus_wait what,
                             uint64_t ns) {
    atomic_fetch_add_explicit(&segment->waits[slot].ns[what], ns, memory_order_relaxed);
}

/* ---- Samples taken and released unmade by a worker, and the end of the worker's rest. */
struct unmade {
    uint32_t given_back, failed;
    uint64_t rests_until_ns;
    char reason[SHMBUS_UNMADE_WORDS * sizeof(uint64_t)]; /* padded by NUL */
};

/* The slot's owner stores its state and adds the newly given-back samples. */
void unmade_note(struct segment *segment, uint32_t slot, uint32_t released,
                 const struct unmade *note);
