/* The retry table: failed samples that the collector requests again from producers.
 *
 * Invariants:
 *  - Only the collector writes an entry, and only while its claim is BUSY. A producer changes only
 *    the claim: from free to its id, back to free, or to ANSWERED. Hence a request goes to a single
 *    producer at a time.
 *  - A claim becomes ANSWERED by compare-and-swap just before its answer's commit; the deadline
 *    takes an entry back by compare-and-swap: exactly one compare-and-swap succeeds.
 *  - Neither side leaves its peer waiting. The collector puts back a claim of a dead producer.
 *    A collector takes over or withdraws the entries of its dead predecessor.
 *  - Values of an entry are copied, bounded and checked before use. */
#pragma once

#include "segment.h"

/* Callers hold a request in a private entry, whose checksum this file computes. A copy's claim is
 * its claimant: producer id + 1, or 0 for an unclaimed request. */

/* For the collector: fills an entry and opens the entry to producers; or ends the request. */
void retry_publish(struct segment *segment, uint32_t at, const struct retry_entry *request);
void retry_withdraw(struct segment *segment, uint32_t at);
enum retry_taken {
    RETRY_TAKEN_BACK,
    RETRY_ANSWERED,   /* and committed, if the claimant lives */
    RETRY_COMMITTING, /* the claimant may or may not complete its commit */
};
/* Ends the request at its deadline, unless already answered. */
enum retry_taken retry_take_back(struct segment *segment, uint32_t at);

/* False for an empty, changing or damaged entry. */
bool retry_read(const struct segment *segment, uint32_t at, struct retry_entry *copy);

/* For a producer: claims and copies a free entry with this number. */
bool retry_claim(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id,
                 struct retry_entry *copy);
/* Returns true if the entry holds this number, claimed by this producer and not answered. */
bool retry_is_held(const struct segment *segment, uint32_t at, uint64_t number,
                   uint64_t producer_id);
/* Puts a claim back; false if lost. */
bool retry_unclaim(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id);
/* Ends a claim, just before the commit of its answer; false if lost. */
bool retry_answer(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id);
