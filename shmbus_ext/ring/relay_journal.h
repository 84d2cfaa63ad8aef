/* The relay's journal: what a sink puts onto this bus from others, exactly once though it dies.
 *
 * Invariants:
 *  - A record of another bus is on this one only if an entry says so: as SETTLED, or as INTENDED with
 *    the lane's count that its commit has. So whoever reaps the lane knows which ones are there.
 *  - The entries of one intent come into force together, by the journal's batch.
 *  - The journal is healed with the lane, under the lane's lock, before the slot is another's: no
 *    commit of a later owner is taken for the sink's.
 *  - An entry that a record names is not used again before the collector has ended that record.
 *  - Only the holder of SHMBUS_LOCK_RELAY writes entries, but for healing, and for `ended`. */
#ifndef SHMBUS_RING_RELAY_JOURNAL_H
#define SHMBUS_RING_RELAY_JOURNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "ring/segment.h"

_Static_assert(SHMBUS_RELAY_MAX_ENTRIES < (1u << (32 - SHMBUS_FLAG_RELAY_SHIFT)) - 1,
               "a record's flags have room for an entry's number");

/* Not an entry: one is chosen. */
#define RELAY_NEW UINT32_MAX

struct writer;

struct relay_origin {
    uint8_t identity[SHMBUS_IDENTITY_BYTES];
    uint64_t producer_id;
    uint64_t sequence;
};

/* What an entry says, copied. */
struct relay_note {
    struct relay_origin origin;
    enum relay_state state; /* OWED, INTENDED or SETTLED */
    uint32_t ended;         /* reason + 1, or 0 */
};

/* The next n commits of the writer are these, in order, and entries[i] is their entry: one that is
 * OWED, or RELAY_NEW. All are in force, or none: false without room for a new entry. */
bool relay_intend(struct segment *segment, const struct writer *writer,
                  const struct relay_origin *origins, uint32_t *entries, uint32_t n);
/* The same of records that are not put at all: settled, and ended for that reason. */
bool relay_drop(struct segment *segment, const struct relay_origin *origins, uint32_t *entries,
                uint32_t n, uint32_t reason);
/* Those of these entries that the writer has committed are settled. */
void relay_settle(struct segment *segment, const struct writer *writer, const uint32_t *entries,
                  uint32_t n);
void relay_forget(struct segment *segment, const uint32_t *entries, uint32_t n);

/* False for an entry that is free, or not in force. */
bool relay_read(const struct segment *segment, uint32_t entry, struct relay_note *note);

/* A lane's owner has gone, which had committed so much. */
void relay_reap(struct segment *segment, uint64_t producer_id, uint64_t committed);
/* Where a record came from; false of one that no relay has put, or whose source has let it go. */
bool relay_origin_of(const struct segment *segment, const struct record_header *record,
                     struct relay_origin *origin);

/* The collector ends a record for good. */
void relay_record_ended(struct segment *segment, const struct record_header *record,
                        uint32_t reason);

#endif
