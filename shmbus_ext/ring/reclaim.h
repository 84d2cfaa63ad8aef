/* How space comes back: a record holds its run, and a run that nothing holds is freed.
 *
 * Invariants:
 *  - A run is freed once it is sealed, walked to its end, without open reservation, without record
 *    in use (live), without writable view of a living producer (writer_pins), and without a view
 *    of a living borrower (SHMBUS_LOCK_VIEW).
 *  - Before a run is freed its link is taken or ended, so its owner never links to a freed run. */
#ifndef SHMBUS_RING_RECLAIM_H
#define SHMBUS_RING_RECLAIM_H

#include <stdbool.h>
#include <stdint.h>

#include "reader_state.h"

/* Holds a record's space, and lets it go. */
void reader_hold(struct reader *self, const struct record_ref *ref);
void reader_let_go(struct reader *self, const struct record_ref *ref);

/* Frees a run if nothing holds it any more. */
void reader_try_free(struct reader *self, uint32_t extent);

/* Frees the runs that have ended and that no view keeps. On a bus that has lent, runs wait for this
 * until they are a share of the bus, or until the reader is idle: one system call then tells of
 * many. */
void reader_tidy(struct reader *self);
void reader_tidy_in_a_pause(struct reader *self);

/* Wakes waiting producers for what was freed. Small amounts are kept back until the reader is idle:
 * waking a producer for each extent would cost both sides more than it gains. */
void reader_announce_space(struct reader *self);

/* Whether a run has little enough alive to be worth moving, whoever holds that; whether any has,
 * which is quicker asked than looking at thousands of records. */
bool reader_run_is_sparse(const struct reader *self, uint32_t extent);
bool reader_any_run_is_sparse(const struct reader *self);

/* Writes a record again in the collector's lane and ends the first copy; ref follows it. */
bool reader_move(struct reader *self, struct record_ref *ref);

/* Puts the lane's cursor on the run that a link names, if it really is the lane's next: orders grow
 * along a lane, so no forged link can make a loop, and a run is entered once, whatever links to it. */
bool lane_enter_run(struct reader *self, struct lane *lane, uint64_t link);

#endif
