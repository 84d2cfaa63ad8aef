/* Reading a pool: a version is leased for as long as anybody in this process copies it or has views
 * of it.
 *
 * Invariants: a leased slot is not written. What is leased was whole: its row was checked under the
 * lock that keeps the publisher out. A reader that dies has its leases ended by the kernel. */
#ifndef SHMBUS_POOL_LEASE_H
#define SHMBUS_POOL_LEASE_H

#include <stdint.h>

#include "pool/pool.h"

/* Leases the newest version. SHARED_NOTHING where its sequence is not above `after`. A row that is
 * not what the pool promises is SHARED_DAMAGED, and nothing is leased then. */
enum shared_status lease_latest(struct pool *self, uint64_t after, uint32_t *slot,
                              struct slot_row *row);
/* Leases the whole version of that number, which need not be the newest: for a way back, while
 * somebody keeps it from the publisher. SHARED_NOTHING where no slot has it. */
enum shared_status lease_version(struct pool *self, int64_t version, uint32_t *slot,
                               struct slot_row *row);
void lease_drop(struct pool *self, uint32_t slot);
/* Copies a row for whoever holds no lock; false where it changed meanwhile or is damaged. */
bool lease_peek(const struct pool *self, uint32_t slot, struct slot_row *row);
/* Sequence and slot of the newest version without leasing it; 0 for none. */
uint64_t lease_newest(const struct pool *self);

#endif
