/* The request lane: prompts to sample, offered by any process and taken by workers, a sample at a
 * time.
 *
 * A row is one group; its prompt is stored once. A cell is one sample of it: open, claimed by a
 * producer, or done. request_feed.h has the feeders' side, this the workers' and the collector's.
 *
 * Invariants:
 *  - A cell is handed to one producer at a time: its claim goes from open to claimed by
 *    compare-and-swap, and carries its row's number, so that no late word counts for a later row.
 *    Cells never become anything else, so a stale compare-and-swap harms nothing.
 *  - A claim ends with its answer's commit, by giving it back, or by its owner's death. The commit's
 *    count is stored before the commit; so whoever reaps the owner knows exactly whether the answer
 *    is in the ring, and gives the sample back if it is not.
 *  - A sample that is open is found: by `next` of its row, or, once that has passed it, by
 *    `returned` of its row and of the lane. Both are set again by every reaper.
 *  - Only the collector ends a row. A row's bytes are copied and checked, and the row is looked at
 *    again, before what they say is used. */
#ifndef SHMBUS_RING_REQUESTS_H
#define SHMBUS_RING_REQUESTS_H

#include <stdbool.h>
#include <stdint.h>

#include "doorbell.h"
#include "request_row.h"

/* A sample that a producer has in hand; number 0 for none. */
struct request_claim {
    uint64_t number; /* of its row */
    uint64_t word;   /* of its cell */
    uint32_t row;
    uint32_t cell;
    uint32_t index; /* of the sample */
};

/* What a row says, copied. `data` is behind it: id, prompt. */
struct request_text {
    uint64_t number;
    int64_t round;
    uint64_t offered_ns;
    uint32_t data_bytes;
    uint16_t group_size;
    uint16_t need;
    uint16_t id_bytes;
    uint16_t split;
    uint16_t level;
    bool admitted; /* one of its samples was handed out */
};

/* How many samples of a row are in which state. */
struct request_counts {
    uint32_t open, claimed, done, given_up;
};

/* Whether anything was ever offered: the one word that others read of a lane that is not used. */
static inline bool requests_are_used(const struct segment *segment) {
    return atomic_load_explicit(&segment->requests.lane->number, memory_order_relaxed) != 0;
}

enum request_take { REQUEST_NONE, REQUEST_TAKEN, REQUEST_TOO_FAR_AHEAD };
/* A worker, in the slot that it holds: the first open sample by priority, then by age. Where groups
 * are bounded, a group is admitted here; TOO_FAR_AHEAD where only that keeps one from being taken. */
enum request_take request_take(struct segment *segment, uint64_t producer_id, uint32_t slot,
                               struct request_claim *claim);
/* Its prompt. Size first: with data NULL; then `text` says for how many bytes there is room. False
 * where the row has ended, is damaged, or has not so many. */
bool request_read(const struct segment *segment, uint32_t row, uint64_t number,
                  struct request_text *text, uint8_t *data);
/* The oldest open request of a group, by its number; 0 where there is none. */
uint64_t request_find(const struct segment *segment, const char *id, uint32_t id_bytes,
                      int64_t round, uint32_t split, uint32_t *row);
/* Whether the sample is still wanted of the claim's owner. */
bool request_is_held(const struct segment *segment, const struct request_claim *claim);
/* Gives it back; false where it is not the claim's any more. */
bool request_give_back(struct segment *segment, const struct request_claim *claim);

/* Around the commit of an answer, by its writer: `count` is the lane's count with this commit. */
void request_intend(struct segment *segment, const struct request_claim *claim, uint64_t count);
void request_answered(struct segment *segment, const struct request_claim *claim);

/* Whoever has taken the slot of a producer that died, after its commits are counted. */
void request_reap(struct segment *segment, uint64_t producer_id, uint64_t committed);

/* The collector: hands out no more samples of a row; and ends it. */
void request_close(struct segment *segment, uint32_t row, uint64_t number);
void request_end(struct segment *segment, uint32_t row, uint64_t number);
/* The samples of a row; false where it is not open under that number. */
bool request_count(const struct segment *segment, uint32_t row, uint64_t number,
                   struct request_counts *counts);

/* Samples of the whole lane: offered = open + claimed + done + given up. */
struct request_totals {
    uint64_t offered, open, claimed, done, given_up;
    uint64_t groups; /* that have not ended */
};
void request_total(const struct segment *segment, struct request_totals *totals);

#endif
