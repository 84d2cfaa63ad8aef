/* The collector's walk: it visits every lane and hands out the records that are committed there.
 *
 * Invariant: one reader a segment, the holder of the collector's file lock. Its state is private
 * memory; from shared memory it takes only what it has bounded.
 *
 * A visit of one lane; reader_next leaves it with each record, and comes back to where it was:
 *
 *     quiet ----(begin_visit)----> pending <----------.
 *       ^                             | none is left  |
 *       |                             v               | b, c
 *       |                   .----> walking -----------+
 *       |                 a |         | at the limit  |
 *       |                   |         v               |
 *       '-----(end_visit)---+----- at limit ----------'
 *
 *     quiet      No counter of the slot has moved since the last visit; begin_visit notes them.
 *     pending    Reservations that were seen open: each that was committed since is handed out.
 *     walking    Records from lane.cursor to lane.limit: each committed one is handed out, each
 *                open reservation becomes a pending one.
 *     at limit   a: the run is sealed and another follows, which the cursor enters.
 *                b: `used` has grown, and with it the limit. What was ended before the new records
 *                   were exposed comes before those.
 *     walking    c: a committed record while pending ones have not been looked at since. Of a
 *                   batch, those were committed before it.
 */
#ifndef SHMBUS_RING_READER_H
#define SHMBUS_RING_READER_H

#include <stdbool.h>

#include "reader_state.h"

/* The next committed record, in self->copy: 1; none for now: 0; memory is short: -1. */
int reader_next(struct reader *self, struct record_ref *ref);

/* Whether some lane has news since its last visit. Makes no system call. */
bool reader_has_events(struct reader *self);

#endif
