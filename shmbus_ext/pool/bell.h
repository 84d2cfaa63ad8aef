/* Sleeping until a pool changes: three futex words, each with a flag that says that somebody waits.
 *
 * Invariant: who waits has stored the flag before it looked one last time; who changes something
 * rings afterwards. Both are sequentially consistent, so at least one sees the other. A waiter that
 * dies leaves at most one spare wake-up. Deaths ring nothing: waits are slices, and whoever wakes
 * looks again at the locks. */
#ifndef SHMBUS_POOL_BELL_H
#define SHMBUS_POOL_BELL_H

#include <stdbool.h>
#include <stdint.h>

#include "pool/layout.h"

enum pool_bell { POOL_BELL_VERSION = 0, POOL_BELL_SPACE, POOL_BELL_RANKS, POOL_BELLS };
enum bell_wait { BELL_RUNG = 0, BELL_TIMEOUT, BELL_INTERRUPTED };

void bell_ring(struct pool_header *header, enum pool_bell which);
/* Announces a wait; the caller then looks again, and gives the ticket to bell_wait. */
uint32_t bell_announce(struct pool_header *header, enum pool_bell which);
enum bell_wait bell_wait(struct pool_header *header, enum pool_bell which, uint32_t ticket,
                         int64_t timeout_ns);

#endif
