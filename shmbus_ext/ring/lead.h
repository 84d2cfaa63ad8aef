/* The lead of producers: groups admitted to the bus and not delivered yet.
 *
 * A row of the table holds one admitted group. The put that begins a group claims a row by
 * compare-and-swap, sibling puts find the row, and the collector frees the row after delivery or
 * another end of the group. The number of usable rows forms the bound, without a counter.
 *
 * Invariants:
 *  - A row's word holds 0, or a hash of its group plus the slot of a claimant with an uncommitted
 *    record. Two groups with one hash share a row, which delays neither group.
 *  - A put of a group with a row always passes: only a put that would begin a group waits.
 *  - A freed row wakes one waiting put and one worker. The waiter that begins a group wakes the
 *    group's siblings: the cost of a delivered group does not grow with the number of waiters.
 *  - No process can leave a row taken for ever. The slot's lock proves the death of a claimant; the
 *    next holder of the slot settles its rows, and the collector, once it has read the ring to its
 *    end, frees settled rows of groups absent from its stash. */
#pragma once

#include "segment.h"

enum lead_verdict {
    LEAD_KNOWN,   /* existing row */
    LEAD_CLAIMED, /* new row of this claimant: settle after the commit, or withdraw */
    LEAD_FULL,
};

/* Returns true if a bound is in force: the only branch in a put on an unbounded bus. */
static inline bool lead_is_bounded(const struct segment *segment) {
    return RELAXED(segment->lead->limit) != 0;
}

/* Table key of a group: a hash with empty low bits. A prompt in two splits makes two groups. */
uint64_t lead_key(const char *id, uint32_t id_bytes, int64_t round, uint32_t split);
/* The same of a key of split SHMBUS_SPLIT_TRAIN. */
uint64_t lead_key_of_split(uint64_t key, uint32_t split);

/* The kind of waiters at `space_bell` that wait to begin this group. */
uint32_t lead_waiters(uint64_t key);

/* For a producer, in its own slot. A claim wakes at most `siblings` waiting puts of the group. */
enum lead_verdict lead_admit(struct segment *segment, uint64_t key, uint32_t slot,
                             uint32_t siblings);
/* Returns true if the group has a row. Claims no row. */
bool lead_knows(const struct segment *segment, uint64_t key);
void lead_settle(struct segment *segment, uint64_t key, uint32_t slot);
void lead_withdraw(struct segment *segment, uint64_t key, uint32_t slot);

/* For the new holder of a dead claimant's slot, after its commits are counted. */
void lead_settle_all(struct segment *segment, uint32_t slot);

/* For the collector, after it closed the group's request: the group was delivered or ended
 * otherwise. Returns true if a row was freed. */
bool lead_leave(struct segment *segment, uint64_t key);
/* A row's word if settled, else 0; lead_free frees a row whose word has not changed. */
uint64_t lead_settled(const struct segment *segment, uint32_t row);
void lead_free(struct segment *segment, uint32_t row, uint64_t word);
/* Returns the first settled row of a group at or after `row`, else SHMBUS_LEAD_ROWS. */
uint32_t lead_find_settled(const struct segment *segment, uint64_t key, uint32_t row);
/* For a bound in versions: groups under lease, and those ended since the last call. */
void lead_follow(struct segment *segment, uint64_t leased, uint64_t ended);

/* The number of taken rows. */
uint32_t lead_held(const struct segment *segment);
