/* The collector's side: walks every lane and hands out records.
 *
 * Invariant: one reader a segment, the holder of the collector's file lock. Its state is private
 * memory; from shared memory it takes only what it has bounded. */
#ifndef SHMBUS_RING_READER_H
#define SHMBUS_RING_READER_H

#include <stdbool.h>
#include <stdint.h>

#include "reader_state.h"

/* The next committed record, in self->copy: 1, none now: 0, memory short: -1. */
int reader_next(struct reader *self, struct record_ref *ref);

/* Whether some lane has moved since it was last visited. Makes no system call. */
bool reader_has_events(struct reader *self);

#endif
