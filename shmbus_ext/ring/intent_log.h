/* Atomic steps of a collector: release records, free a run, move a record.
 *
 * The collector writes each step into the segment before the step and clears the entry afterwards.
 * A death in between leaves an intent, which the next collector replays.
 *
 * Invariants:
 *  - A release survives death atomically: the collector releases and counts every record exactly
 *    once, or no record.
 *  - Replay of a partly or fully completed intent changes nothing: every word written changes from
 *    an exact value, or to a value stated by the intent. */
#pragma once

#include "record.h"
#include "segment.h"

/* Ends n records of one split for good, for one reason, atomically; n at most
 * SHMBUS_MAX_GROUP_SIZE. Their space becomes reusable after reader_let_go. Records with a damaged
 * header use split SHMBUS_MAX_SPLITS, which no split counts. */
void intent_log_release(struct segment *segment, const struct record_ref *const *refs, uint32_t n,
                        enum shmbus_reason reason, uint32_t split);

/* Frees a run of several extents, leased under `word`. */
void intent_log_free(struct segment *segment, uint32_t first, uint32_t span, uint64_t word);

/* Between begin and end, the collector publishes the record at `to` and ends the copy at `from`. */
void intent_log_begin_move(struct segment *segment, const struct record_place *from,
                           const struct record_place *to);
void intent_log_end_move(struct segment *segment);

/* Completes the last collector's intents. The caller holds the collector's lock. */
void intent_log_replay(struct segment *segment);
