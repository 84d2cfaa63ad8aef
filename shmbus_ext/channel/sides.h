/* The two sides: who is one, whether it lives, what it states.
 *
 * Invariant: a side's row and statement are written by whoever holds its lock byte. A side that is
 * OPEN and whose byte nobody holds has died. */
#ifndef SHMBUS_CHANNEL_SIDES_H
#define SHMBUS_CHANNEL_SIDES_H

#include "channel/channel.h"

enum channel_life { CHANNEL_ABSENT = 0, CHANNEL_ALIVE, CHANNEL_DEAD, CHANNEL_LEFT };

/* SHARED_HELD where another process is that side. */
enum shared_status sides_claim(struct channel *self, enum channel_side_name side,
                                const char *label, uint32_t pid);
/* Says that this side ends by its own will, and gives the lock back. */
void sides_leave(struct channel *self, const char *reason);
enum channel_life sides_life(const struct channel *self, enum channel_side_name side);

/* At most CHANNEL_STATEMENT_BYTES. */
void sides_state(struct channel *self, const uint8_t *data, uint32_t bytes);
uint64_t sides_stated(const struct channel *self, enum channel_side_name side);
/* A copy of a whole statement and its version; SHARED_NOTHING where there is none. */
enum shared_status sides_statement(const struct channel *self, enum channel_side_name side,
                                    uint8_t *data, uint32_t *bytes, uint64_t *version);

#endif
