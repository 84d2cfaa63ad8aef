/* A bus that was removed: its name is gone, and who still has it mapped learns so.
 *
 * Invariant: a removed bus stays one. The word that says so is the one that says whether producers
 * wait, so a put that finds the bus running looks at nothing more. */
#ifndef SHMBUS_RING_REMOVAL_H
#define SHMBUS_RING_REMOVAL_H

#include <stdbool.h>

#include "segment.h"

/* Where the file has lost its last name: says so to all, once, and wakes everybody who waits. A
 * system call. Whether it has. A read-only mapping only looks. */
bool removal_note(struct segment *self);

static inline bool removal_happened(const struct segment *self) {
    return atomic_load_explicit(&self->header->paused, memory_order_acquire) == SHMBUS_REMOVED;
}

#endif
