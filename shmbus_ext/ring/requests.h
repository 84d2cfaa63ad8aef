/* The request lane: prompts to sample, offered by any process and taken by workers, a sample at a
 * time.
 *
 * A row is one group; its prompt is stored once. A cell is one sample of it: open, claimed by a
 * producer, or done.
 *
 * Invariants:
 *  - A cell is handed to one producer at a time: its claim goes from open to claimed by
 *    compare-and-swap, and carries its row's number, so that no late word counts for a later row.
 *    Cells never become anything else, so a stale compare-and-swap harms nothing.
 *  - A claim ends just before its answer's commit, by giving it back, by a retry of its sample, or by
 *    its owner's death: by compare-and-swap, so one of these happens. The commit's count is stored
 *    before; so whoever reaps the owner knows exactly whether the answer is in the ring, and gives
 *    the sample back if it is not.
 *  - A sample that is open is found: by `next` of its row, or, once that has passed it, by
 *    `returned` of its row and of the lane. Both are set again by every reaper.
 *  - Only the collector ends a row. A row's bytes are copied and checked, and the row is looked at
 *    again, before what they say is used. */
#ifndef SHMBUS_RING_REQUESTS_H
#define SHMBUS_RING_REQUESTS_H

#include <stdbool.h>
#include <stdint.h>

#include "ring/segment.h"

/* ---- The words of the request lane, and a row as a process reads it.
 *
 * Invariant: what a row says is copied, bounded and checked before it is used, and the row's word is
 * looked at again after what it points to was read. */
#define REQUEST_NUMBER_BITS 28u
#define REQUEST_NUMBER_MASK ((UINT64_C(1) << REQUEST_NUMBER_BITS) - 1)
#define REQUEST_PRODUCER_BITS 34u
#define REQUEST_PRODUCER_MASK ((UINT64_C(1) << REQUEST_PRODUCER_BITS) - 1)
#define REQUEST_COUNT_MASK ((UINT64_C(1) << (64 - REQUEST_NUMBER_BITS)) - 1)
/* The producer of a sample that nobody will make any more, and of a claimed one that another node
 * makes: no death on this bus gives it back. */
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

/* The claim of a sample that nobody has, and the word of a row of which nobody has had more. */
uint64_t request_open_word(uint64_t number);
uint64_t request_next_word(uint64_t number, uint32_t sample);

uint32_t request_row_crc(const struct request_row *row);

/* The number of a row if it is open, else 0. */
uint64_t request_open_row(const struct segment *segment, uint32_t index);

/* A row's numbers, copied and bounded; false unless it is open under this number. */
bool request_copy_row(const struct segment *segment, uint32_t index, uint64_t number,
                      struct request_row *copy);

/* ---- The workers' and the collector's side. */
/* The cell of a claim in the retry table. */
#define REQUEST_IS_RETRY UINT32_MAX
/* A sample that a producer has in hand; number 0 for none. */
struct request_claim {
    uint64_t number; /* of its row */
    uint64_t word;   /* of its cell; of a retry the producer's id */
    uint32_t row;    /* of the lane, or of the retry table */
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
/* Its prompt; with data NULL its size. False where it has ended, or without room. */
bool request_read(const struct segment *segment, uint32_t row, uint64_t number,
                  struct request_text *text, uint8_t *data);
/* The oldest open request of a group, by its number; 0 where there is none. */
uint64_t request_find(const struct segment *segment, const char *id, uint32_t id_bytes,
                      int64_t round, uint32_t split, uint32_t *row);
/* Whether the sample is still wanted of the claim's owner. */
bool request_is_held(const struct segment *segment, const struct request_claim *claim);
/* Gives it back; false where it is not the claim's any more. */
bool request_give_back(struct segment *segment, const struct request_claim *claim);

/* Takes the samples of a row from their owners, whose answers are not wanted then; how many. */
uint32_t request_revoke(struct segment *segment, uint32_t row, uint64_t number);

/* Around the commit of an answer, by its writer: ends the claim; false, and nothing may be
 * committed, where it is not held. `count` is the lane's count with this commit. */
bool request_answer(struct segment *segment, const struct request_claim *claim, uint64_t count);
void request_answered(struct segment *segment, const struct request_claim *claim);
/* Claims an entry of the retry table, and ends the claim of a late sample's first try; false too
 * where that was answered. */
bool request_claim_retry(struct segment *segment, uint32_t at, uint64_t number,
                         uint64_t producer_id);

/* Whoever has taken the slot of a producer that died, after its commits are counted. */
void request_reap(struct segment *segment, uint64_t producer_id, uint64_t committed);

/* The collector: hands out no more samples of a row; and ends it. */
void request_close(struct segment *segment, uint32_t row, uint64_t number);
void request_end(struct segment *segment, uint32_t row, uint64_t number);
/* The samples of a row; false where it is not open under that number. */
bool request_count(const struct segment *segment, uint32_t row, uint64_t number,
                   struct request_counts *counts);

/* The relay, any number of times: other nodes have what is open of a row, so many; one was put. */
uint32_t request_send(struct segment *segment, uint32_t row, uint64_t number);
void request_arrived(struct segment *segment, uint32_t row, uint64_t number, uint32_t sample);

/* Samples of the whole lane: offered = open + claimed + done + given up. */
struct request_totals {
    uint64_t offered, open, claimed, done, given_up;
    uint64_t groups; /* that have not ended */
};
void request_total(const struct segment *segment, struct request_totals *totals);

/* ---- The feeders' side of the request lane: any process may offer, one at a time.
 *
 * Invariants:
 *  - Rows, and the room of cells and prompts, are given out and taken back only under the feeders'
 *    lock, which the kernel drops with its holder. `feeding` says that one was at work: whoever gets
 *    the lock then finishes what it left, from the rows alone, so that nothing leaks.
 *  - A row is whole before it is open, and open before workers find it in the order.
 *  - Nothing here waits: a full lane, and a lock that is held, are answers. */
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
    FEED_DONE = 0,  /* all of them */
    FEED_FULL,      /* until groups end */
    FEED_TOO_LARGE, /* for the whole lane */
    FEED_HELD,      /* another feeder is at work; for moments, unless it is stopped */
    FEED_ERROR,     /* errno says why */
};
/* Whether an empty lane has room for it. */
bool request_can_fit(const struct segment *segment, const struct request_offer *offer);
/* The most that are offered under one lock: others wait for it. */
#define REQUEST_OFFERS_AT_ONCE 64u
/* Offers groups in order, and rings once: `done` of them, the last `number`. */
enum request_feed request_offer(struct segment *segment, const struct request_offer *offers,
                                uint32_t count, uint32_t *done, uint64_t *number);

/* Ends what a dead feeder left, if there is anything; for the collector. */
void request_heal(struct segment *segment);

/* Bytes of prompts that are free; a hint. */
uint64_t request_free_bytes(const struct segment *segment);

#endif
