/* The relay's journal: a sink writes records from other buses onto this bus exactly once, despite
 * death of the sink.
 *
 * Invariants:
 *  - A record of another bus exists on this bus only with an entry: SETTLED, or INTENDED with the
 *    lane's count of its commit. From the entries, a reaper of the lane knows the written records.
 *  - The entries of one intent come into force together, by the journal's batch.
 *  - The journal is healed with the lane, under the lane's lock, before another owner takes the
 *    slot: no commit of a later owner passes for a commit of the sink.
 *  - An entry named by a record stays in use until the collector has ended the record.
 *  - Only the holder of SHMBUS_LOCK_RELAY writes entries, except for healing and for `ended`. */
#pragma once

#include "ring/segment.h"

_Static_assert(SHMBUS_RELAY_MAX_ENTRIES < (1u << (32 - SHMBUS_FLAG_RELAY_SHIFT)) - 1,
               "a record's flags have room for an entry's number");

/* Placeholder for a new entry. */
#define RELAY_NEW UINT32_MAX

struct writer;

struct relay_origin {
    uint8_t identity[SHMBUS_IDENTITY_BYTES];
    uint64_t producer_id;
    uint64_t sequence;
};

/* A copy of an entry. */
struct relay_note {
    struct relay_origin origin;
    enum relay_state state; /* OWED, INTENDED or SETTLED */
    uint32_t ended;         /* reason + 1, or 0 */
};

/* Declares the next n commits of the writer, in order; entries[i] names the entry of commit i: an
 * OWED entry, or RELAY_NEW. Every entry comes into force, or none: false without room for a new
 * entry. */
bool relay_intend(struct segment *segment, const struct writer *writer,
                  const struct relay_origin *origins, uint32_t *entries, uint32_t n);
/* Declares records that the sink discards: settled, and ended for the given reason. */
bool relay_drop(struct segment *segment, const struct relay_origin *origins, uint32_t *entries,
                uint32_t n, uint32_t reason);
/* Settles the entries already committed by the writer. */
void relay_settle(struct segment *segment, const struct writer *writer, const uint32_t *entries,
                  uint32_t n);
void relay_forget(struct segment *segment, const uint32_t *entries, uint32_t n);

/* False for an entry free or not in force. */
bool relay_read(const struct segment *segment, uint32_t entry, struct relay_note *note);

/* Heals the journal after a lane's owner, gone with `committed` commits. */
void relay_reap(struct segment *segment, uint64_t producer_id, uint64_t committed);
/* A record's origin; false for a record not written by a relay, or already released by its
 * source. */
bool relay_origin_of(const struct segment *segment, const struct record_header *record,
                     struct relay_origin *origin);

/* The collector ends a record for good. */
void relay_record_ended(struct segment *segment, const struct record_header *record,
                        uint32_t reason);
