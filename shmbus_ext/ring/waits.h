/* How long whom has waited, for whoever looks at the bus.
 *
 * Invariant: a count only grows, and nothing reads it to decide anything. */
#ifndef SHMBUS_RING_WAITS_H
#define SHMBUS_RING_WAITS_H

#include "segment.h"

/* `slot` has waited so much longer; the collector's is max_producers. */
static inline void waits_add(struct segment *segment, uint32_t slot, enum shmbus_wait what,
                             uint64_t ns) {
    atomic_fetch_add_explicit(&segment->waits[slot].ns[what], ns, memory_order_relaxed);
}

#endif
