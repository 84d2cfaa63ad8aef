/* Becoming the bus's sink: the only process that writes the relay's journal.
 *
 * Invariant: there is one at a time, and it begins once the lane of the one before it was reaped. */
#ifndef SHMBUS_RING_RELAY_BEGIN_H
#define SHMBUS_RING_RELAY_BEGIN_H

#include "segment.h"
#include "writer.h"

enum relay_begun { RELAY_BEGUN, RELAY_BUSY, RELAY_SYSTEM_ERROR };

/* Takes the lock, heals what the last sink has left, and counts the incarnation. Waits up to two
 * seconds for whoever reaps that sink's lane. */
enum relay_begun relay_begin(struct segment *segment);
void relay_end(struct segment *segment);

/* The lane that this sink puts into. */
void relay_bind(struct segment *segment, const struct writer *writer);

#endif
