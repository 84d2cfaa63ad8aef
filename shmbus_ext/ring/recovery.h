/* What a dead producer left, and how it ends: its last commit is counted or not, its lane sealed,
 * its leases that never got a place in the lane freed, the samples that it had in hand given back.
 *
 * Invariants: the caller holds the lock of the slot, so nobody else writes there. A recovery that is
 * itself ended by death is begun again by the next holder of that lock, from any of its steps. */
#ifndef SHMBUS_RING_RECOVERY_H
#define SHMBUS_RING_RECOVERY_H

#include <stdbool.h>
#include <stdint.h>

#include "writer.h"

/* Ends what the last owner of a slot left, and frees the slot; nothing where it is free. */
void recover_producer(struct segment *segment, uint32_t slot_index);

/* The same for the last collector's lane; the extent left to its successor, or NO_EXTENT. */
uint32_t recover_collector(struct segment *segment);

/* Recovers slots whose owners have ended, but the caller's own (or NO_SLOT); how many had died. Each
 * slot of a living owner costs a system call that grows with the locks of the file. So a look ends
 * after `most` living owners, and the next look of any process goes on there: a death is found within
 * one look for each RECOVERY_SHARE living owners. */
#define NO_SLOT UINT32_MAX
#define RECOVERY_SHARE 256u
#define RECOVERY_WHOLE UINT32_MAX
uint32_t recover_dead(struct segment *segment, uint32_t own_slot, uint32_t most);

/* Elects one looker among the workers that wait for what a dead worker had in hand: true for one call
 * of all processes in RECOVERY_PERIOD_NS, and for none soon after a collector's recovery_reserve. */
#define RECOVERY_PERIOD_NS UINT64_C(500000000)
#define RECOVERY_COLLECTOR_NS UINT64_C(2000000000)
bool recovery_elect(struct segment *segment);
void recovery_reserve(struct segment *segment);

/* ---- Becoming the bus's sink: the only process that writes the relay's journal.
 *
 * Invariant: there is one at a time, and it begins once the lane of the one before it was reaped. */
enum relay_begun { RELAY_BEGUN, RELAY_BUSY, RELAY_SYSTEM_ERROR };

/* Takes the lock, heals, counts the incarnation; waits 2 s for who reaps the last lane. */
enum relay_begun relay_begin(struct segment *segment);

/* The lane that this sink puts into. */
void relay_bind(struct segment *segment, const struct writer *writer);

#endif
