/* The table of wanted samples: what the collector asks producers for again.
 *
 * Invariants: the collector alone writes a row, and only while its claim is BUSY or its own to
 * overwrite; a producer changes nothing but the claim, from 0 to itself and back. So a request is
 * handed to one producer at a time, and neither side can leave the other waiting: a claim whose
 * producer has died is put back by the collector, and a dead collector's rows are read, and taken
 * over or withdrawn, by the next. What a row says is copied, bounded and checked before it is used. */
#ifndef SHMBUS_RING_RETRY_TABLE_H
#define SHMBUS_RING_RETRY_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "segment.h"

/* One request, as either side hands it over. */
struct wanted {
    uint64_t number; /* grows from request to request */
    int64_t epoch;
    uint64_t asked_ns;
    uint64_t claimant; /* producer id + 1; 0 for none, WANTED_BUSY while the row changes */
    uint32_t group_size; /* 0 where nobody has said it */
    uint32_t index;
    uint32_t attempt;
    uint16_t id_bytes;
    uint16_t reason_bytes;
    char id[SHMBUS_WANTED_ID_BYTES];
    char reason[SHMBUS_WANTED_REASON_BYTES];
};

/* The collector: fill a row and let producers take it; or end what it asks for. */
void wanted_publish(struct segment *segment, uint32_t row, const struct wanted *request);
void wanted_withdraw(struct segment *segment, uint32_t row);

/* False where the row is empty, changes just now, or does not hold. */
bool wanted_read(const struct segment *segment, uint32_t row, struct wanted *copy);

/* A producer: take the row if it is free and still has this number. */
bool wanted_claim(struct segment *segment, uint32_t row, uint64_t number, uint64_t producer_id);
/* Puts a claim back; false where it is not this producer's any more. */
bool wanted_unclaim(struct segment *segment, uint32_t row, uint64_t producer_id);

#endif
