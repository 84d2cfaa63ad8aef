/* The request lane: prompts to sample, offered by any process, and taken by workers sample by
 * sample.
 *
 * A row holds one group and its prompt, stored once. A cell holds one sample: open, claimed by a
 * producer, or done.
 *
 * Invariants:
 *  - A cell goes to one producer at a time: its claim changes from open to claimed by
 *    compare-and-swap, and carries its row's number, to keep a late word from counting for a later
 *    row. Cell memory serves no other purpose: a stale compare-and-swap harms nothing.
 *  - A claim ends by compare-and-swap just before its answer's commit, or by a give-back, by a
 *    retry of its sample, or by its owner's death: exactly one of these happens. The commit's count
 *    is stored before: from the count, a reaper of the owner knows if the ring holds the answer,
 *    and otherwise gives the sample back.
 *  - Workers find every open sample: by `next` of its row, or, after `next` has passed, by
 *    `returned` of its row and of the lane. Every reaper sets both flags again.
 *  - Only the collector ends a row. Use of a row's bytes follows a copy, a check, and another look
 *    at the row. */
#pragma once

#include "ring/segment.h"

/* Wakes at most `most` idle workers. */
static inline void request_ring(struct segment *segment, uint32_t most) {
    bell_ring_for(&segment->requests.lane->work, WORK_IDLE, most);
}

/* ---- The words of the request lane, and a row as read by a process.
 *
 * Invariant: values of a row are copied, bounded and checked before use, and the row's word is
 * checked again after reads through the row's pointers. */
#define REQUEST_NUMBER_BITS 28u
#define REQUEST_NUMBER_MASK ((UINT64_C(1) << REQUEST_NUMBER_BITS) - 1)
#define REQUEST_PRODUCER_BITS 34u
#define REQUEST_PRODUCER_MASK ((UINT64_C(1) << REQUEST_PRODUCER_BITS) - 1)
#define REQUEST_COUNT_MASK ((UINT64_C(1) << (64 - REQUEST_NUMBER_BITS)) - 1)
/* The producer of a sample given up for good, and of a claimed sample made on another node: no
 * death on this bus gives the sample back. */
#define REQUEST_NOBODY REQUEST_PRODUCER_MASK

static inline uint64_t request_claim_word(enum request_kind kind, uint64_t producer, uint64_t number) {
    return (uint64_t)kind << 62 | (producer & REQUEST_PRODUCER_MASK) << REQUEST_NUMBER_BITS |
           (number & REQUEST_NUMBER_MASK);
}

static inline enum request_kind request_kind_of(uint64_t claim) {
    return (enum request_kind)(claim >> 62);
}

static inline uint64_t request_producer_of(uint64_t claim) {
    return claim >> REQUEST_NUMBER_BITS & REQUEST_PRODUCER_MASK;
}

static inline uint32_t request_state_of(uint64_t word) {
    return (uint32_t)(word & 3);
}

static inline uint64_t request_number_of(uint64_t word) {
    return word >> 2;
}

/* The claim of an open sample, and the word of a row with only new samples. */
uint64_t request_open_word(uint64_t number);
uint64_t request_next_word(uint64_t number, uint32_t sample);

uint32_t request_row_crc(const struct request_row *row);

/* The number of an open row, else 0. */
uint64_t request_open_row(const struct segment *segment, uint32_t index);

/* Swaps a row's word, counted as a change of its chunk. */
bool request_change_word(const struct request_parts *parts, uint32_t index, uint64_t from,
                         uint64_t to);
/* The changes of a chunk so far; REQUEST_CHANGES during a change, or after a death within it. */
#define REQUEST_CHANGES UINT64_MAX
uint64_t request_changes(const struct request_parts *parts, uint32_t chunk);

/* Copies and bounds a row's numbers; false unless the row is open under this number. */
bool request_copy_row(const struct segment *segment, uint32_t index, uint64_t number,
                      struct request_row *copy);

/* ---- The workers' and the collector's side. */
/* The cell of a claim in the retry table. */
#define REQUEST_IS_RETRY UINT32_MAX
/* A sample claimed by a producer; number 0: no sample. */
struct request_claim {
    uint64_t number; /* of the row */
    uint64_t word;   /* of the cell; for a retry the producer's id */
    uint32_t row;    /* of the lane, or of the retry table */
    uint32_t cell;
    uint32_t index; /* of the sample */
};

/* Samples of a row by state; `answering` of the claimed are under commit, and may be missing from
 * the ring. */
struct request_counts {
    uint32_t open, claimed, done, given_up, answering;
};

/* Returns true after the first offer: the only word read of an unused lane. */
static inline bool requests_are_used(const struct segment *segment) {
    return RELAXED(segment->requests.lane->number) != 0;
}

enum request_take { REQUEST_NONE, REQUEST_TAKEN, REQUEST_TOO_FAR_AHEAD };
/* Takes the first open sample by priority, then by age, for a worker in its own slot. On a bus with
 * a bound, this call admits the group; TOO_FAR_AHEAD if only the bound blocks a sample. */
enum request_take request_take(struct segment *segment, uint64_t producer_id, uint32_t slot,
                               struct request_claim *claim);
/* Copies a row and its id and prompt; with data NULL, the row alone, whose data_bytes the next call
 * expects. False after the row's end. */
bool request_read(const struct segment *segment, uint32_t row, uint64_t number,
                  struct request_row *copy, uint8_t *data);
/* Returns true once a worker took a sample of the group. */
static inline bool request_is_admitted(const struct segment *segment, uint32_t row) {
    return ACQUIRE(segment->requests.rows[row].admitted) != 0;
}
/* The number of a group's oldest open request; 0 without one. */
uint64_t request_find(const struct segment *segment, const char *id, uint32_t id_bytes,
                      int64_t round, uint32_t split, uint32_t *row);
/* Returns true while the claim's owner still holds the sample. */
bool request_is_held(const struct segment *segment, const struct request_claim *claim);
/* Gives a claimed sample back; false if the claim was lost. */
bool request_give_back(struct segment *segment, const struct request_claim *claim);

/* Revokes the samples of a row from their owners, whose answers no longer count. Returns the number
 * of samples. */
uint32_t request_revoke(struct segment *segment, uint32_t row, uint64_t number);

/* Precedes the commit of an answer, by its writer: ends the claim. False if the claim was lost;
 * then the writer must not commit. `count`: the lane's count after this commit. */
bool request_answer(struct segment *segment, const struct request_claim *claim, uint64_t count);
void request_answered(struct segment *segment, const struct request_claim *claim);
/* Claims an entry of the retry table, and ends the claim of a late sample's first attempt; false
 * also if already answered. */
bool request_claim_retry(struct segment *segment, uint32_t at, uint64_t number,
                         uint64_t producer_id);

/* For the new holder of a dead producer's slot, after its commits are counted. */
void request_reap(struct segment *segment, uint64_t producer_id, uint64_t committed);

/* The collector: hands out no more samples of a row; and ends it. */
void request_close(struct segment *segment, uint32_t row, uint64_t number);
void request_end(struct segment *segment, uint32_t row, uint64_t number);
/* Counts the samples of a row; false if the row is not open under the number. */
bool request_count(const struct segment *segment, uint32_t row, uint64_t number,
                   struct request_counts *counts);

/* For the relay, idempotent: hands the open samples of a row to other nodes and returns the number
 * of samples there. request_arrived: an answer arrived. */
uint32_t request_send(struct segment *segment, uint32_t row, uint64_t number);
void request_arrived(struct segment *segment, uint32_t row, uint64_t number, uint32_t sample);

/* Samples of the whole lane: offered = open + claimed + done + given up. */
struct request_totals {
    uint64_t offered, open, claimed, done, given_up;
    uint64_t groups; /* groups not ended yet */
};
void request_total(const struct segment *segment, struct request_totals *totals);

/* ---- The feeders' side of the request lane: any process may offer, one process at a time.
 *
 * Invariants:
 *  - Only the holder of the feeders' lock allocates and frees rows, cells and prompts; the kernel
 *    drops the lock with its holder. `feeding` marks a change in progress: the next holder of the
 *    lock completes an interrupted change from the rows alone, without leaks.
 *  - A row is complete before it opens, and open before workers find the row in the order.
 *  - No call here waits: a full lane and a held lock are return values. */
/* A group to make. */
struct request_offer {
    const void *id;
    const void *prompt;
    uint32_t id_bytes;
    uint32_t prompt_bytes;
    uint32_t split; /* below SHMBUS_MAX_SPLITS */
    int64_t round;
    uint32_t group_size;
    uint32_t need;
    uint32_t level;
};

enum request_feed {
    FEED_DONE = 0,  /* every offer */
    FEED_FULL,      /* until groups end */
    FEED_TOO_LARGE, /* for the whole lane */
    FEED_HELD,      /* another feeder at work; for moments, unless stopped */
    FEED_ERROR,     /* errno says why */
};
/* Returns true if the offer fits into an empty lane. */
bool request_can_fit(const struct segment *segment, const struct request_offer *offer);
/* Most offers under one lock, since other feeders wait for the lock. */
#define REQUEST_OFFERS_AT_ONCE 64u
/* Offers groups in order, and rings once: `done` of them, the last `number`. */
enum request_feed request_offer(struct segment *segment, const struct request_offer *offers,
                                uint32_t count, uint32_t *done, uint64_t *number);

/* Completes a dead feeder's work, if any; for the collector. */
void request_heal(struct segment *segment);

/* Free bytes for prompts; a hint. */
uint64_t request_free_bytes(const struct segment *segment);
