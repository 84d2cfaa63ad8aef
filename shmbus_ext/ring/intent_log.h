/* What a collector does as a whole or not at all: release records, free a run, move a record.
 *
 * Each is written down in the segment before it is done, and struck out after it. A collector that
 * dies between the two leaves an intent, which the next one replays.
 *
 * Invariants:
 *  - A release is atomic over death: all of its records are released and counted, once, or none.
 *  - Replaying an intent that was done already, in part or in full, changes nothing: each word that
 *    it writes, it writes from an exact value, or to one that the intent states. */
#ifndef SHMBUS_RING_INTENT_LOG_H
#define SHMBUS_RING_INTENT_LOG_H

#include <stdint.h>

#include "record.h"
#include "segment.h"

/* Ends n records of one split for good, for one reason, atomically; n at most
 * SHMBUS_MAX_GROUP_SIZE. Their space is reused once they are let go too. The split of a record whose
 * header is damaged is SHMBUS_MAX_SPLITS: none counts it. */
void intent_log_release(struct segment *segment, const struct record_ref *const *refs, uint32_t n,
                        enum shmbus_reason reason, uint32_t split);

/* Frees a run of several extents, which was leased as `word` says. */
void intent_log_free(struct segment *segment, uint32_t first, uint32_t span, uint64_t word);

/* Between the two the record is published at `to`, and ended at `from`. */
void intent_log_begin_move(struct segment *segment, const struct record_place *from,
                           const struct record_place *to);
void intent_log_end_move(struct segment *segment);

/* Ends what the last collector intended. The caller holds the collector's lock. */
void intent_log_replay(struct segment *segment);

#endif
