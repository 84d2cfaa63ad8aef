/* Recovery after a dead producer: decide its last commit, seal its lane, free its leases without a
 * place in the lane, give back its claimed samples.
 *
 * Invariants: the caller holds the lock of the slot, which excludes other writers. If death
 * interrupts a recovery at any step, the next holder of the lock restarts the recovery. */
#pragma once

#include "writer.h"

/* Completes the last owner's work and frees the slot; a no-op for a free slot. */
void recover_producer(struct segment *segment, uint32_t slot_index);

/* The same for the last collector's lane; the extent left to its successor, or NO_EXTENT. */
uint32_t recover_collector(struct segment *segment);

/* Recovers slots of ended owners, except the caller's own slot (or NO_SLOT). Returns the number of
 * dead producers. Every slot of a living owner costs a system call that grows with the locks of the
 * file. Therefore a look ends after `most` living owners, and the next look of any process
 * continues there: recovery finds a death within one look for every RECOVERY_SHARE living
 * owners. */
#define NO_SLOT UINT32_MAX
#define RECOVERY_SHARE 256u
#define RECOVERY_WHOLE UINT32_MAX
uint32_t recover_dead(struct segment *segment, uint32_t own_slot, uint32_t most);

/* Elects one looker among the workers waiting for samples of a dead worker: true for one call
 * across processes in RECOVERY_PERIOD_NS, and false soon after a collector's recovery_reserve. */
#define RECOVERY_PERIOD_NS UINT64_C(500000000)
#define RECOVERY_COLLECTOR_NS UINT64_C(2000000000)
bool recovery_elect(struct segment *segment);
void recovery_reserve(struct segment *segment);

/* ---- Election of the bus's sink: the only process that writes the relay's journal.
 *
 * Invariant: at most one sink exists, and a sink begins after the reaping of its predecessor's
 * lane. */
enum relay_begun { RELAY_BEGUN, RELAY_BUSY, RELAY_SYSTEM_ERROR };

/* Takes the lock, heals, counts the incarnation; waits 2 s for who reaps the last lane. */
enum relay_begun relay_begin(struct segment *segment);

/* Binds the journal to the lane of this sink. */
void relay_bind(struct segment *segment, const struct writer *writer);
