/* Sleeping until the other side has done something: a futex word for each direction.
 *
 * Invariant: who waits has stored the flag before it looked one last time; who changes something
 * rings afterwards. Both are sequentially consistent, so at least one sees the other. Deaths ring
 * nothing: waits are slices, and whoever wakes looks again at the locks. */
#ifndef SHMBUS_CHANNEL_BELL_H
#define SHMBUS_CHANNEL_BELL_H

#include <stdint.h>

#include "channel/layout.h"

enum channel_wait { CHANNEL_RUNG = 0, CHANNEL_TIMEOUT, CHANNEL_INTERRUPTED };

/* Wakes whoever waits for something of this side. */
void channel_ring(struct channel_header *header, enum channel_side_name by);
/* Announces a wait for the other side; the caller then looks again, and gives the ticket to
 * channel_wait. */
uint32_t channel_announce(struct channel_header *header, enum channel_side_name by);
enum channel_wait channel_wait(struct channel_header *header, enum channel_side_name by,
                               uint32_t ticket, int64_t timeout_ns);

#endif
