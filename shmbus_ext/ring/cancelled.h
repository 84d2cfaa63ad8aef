/* The groups that ended last without all of their samples, so that who still works on one can stop.
 *
 * A group is known by a hash of its key: 64 bits, so that a wrong answer is not to be expected among
 * SHMBUS_CANCELLED of them.
 *
 * Invariant: the collector alone writes. An entry that is overwritten was the oldest. */
#ifndef SHMBUS_RING_CANCELLED_H
#define SHMBUS_RING_CANCELLED_H

#include <stdbool.h>
#include <stdint.h>

#include "segment.h"

/* Of a group's key; the same in every process. Never 0. */
uint64_t group_key_hash(const char *id, uint32_t bytes, int64_t round, uint32_t split);

void cancelled_add(struct segment *segment, uint64_t key_hash);
bool cancelled_has(const struct segment *segment, uint64_t key_hash);

#endif
