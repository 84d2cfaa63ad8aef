/* The retry table: the failed samples that the collector asks producers for again.
 *
 * Invariants:
 *  - The collector alone writes an entry, and only while its claim is BUSY. A producer changes
 *    nothing but the claim: from free to itself, and back, or to ANSWERED. So a request is handed to
 *    one producer at a time.
 *  - A claim becomes ANSWERED by compare-and-swap just before its answer's commit, and an entry is
 *    taken back by compare-and-swap at its deadline: of both, one happens.
 *  - Neither side can leave the other waiting. A claim whose producer has died is put back by the
 *    collector. A dead collector's entries are taken over or withdrawn by its successor.
 *  - What an entry says is copied, bounded and checked before it is used. */
#ifndef SHMBUS_RING_RETRY_TABLE_H
#define SHMBUS_RING_RETRY_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "segment.h"

/* One request, as either side hands it over. */
struct retry_request {
    uint64_t number; /* grows from request to request */
    int64_t round;
    uint64_t asked_ns;
    uint64_t claimant;   /* producer id + 1; 0 for none */
    uint64_t late;       /* 1: the first try may still run */
    uint32_t group_size; /* 0 where it is unknown */
    uint32_t need;       /* the same */
    uint32_t split;
    uint32_t index;
    uint32_t attempt;
    uint16_t id_bytes;
    uint16_t reason_bytes;
    char id[SHMBUS_RETRY_ID_BYTES];
    char reason[SHMBUS_RETRY_REASON_BYTES];
};

/* The collector: fills the entry at an index and lets producers claim it; or ends its request. */
void retry_publish(struct segment *segment, uint32_t at, const struct retry_request *request);
void retry_withdraw(struct segment *segment, uint32_t at);
enum retry_taken {
    RETRY_TAKEN_BACK,
    RETRY_ANSWERED,   /* and committed, if its claimant lives */
    RETRY_COMMITTING, /* its claimant is about to commit the answer, or not to */
};
/* The same at the request's deadline, unless it was answered. */
enum retry_taken retry_take_back(struct segment *segment, uint32_t at);

/* False where the entry is empty, is being changed, or is damaged. */
bool retry_read(const struct segment *segment, uint32_t at, struct retry_request *copy);

/* A producer: claims the entry, and copies it, if it is free and still has this number. */
bool retry_claim(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id,
                 struct retry_request *copy);
/* Whether the entry has this number, and this producer has claimed it and not answered. */
bool retry_is_held(const struct segment *segment, uint32_t at, uint64_t number,
                   uint64_t producer_id);
/* Puts a claim back; false where it is not held. */
bool retry_unclaim(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id);
/* Ends a claim, just before the commit of its answer; false where it is not held. */
bool retry_answer(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id);

#endif
