/* How far producers may be ahead: groups that are admitted to the bus and not delivered yet.
 *
 * A row of the table is one admitted group. The put that begins a group claims a row by
 * compare-and-swap, its siblings find it, and the collector frees it when the group is delivered or
 * has ended otherwise. So the number of rows that may be taken is the bound, and nothing is counted.
 *
 * Invariants:
 *  - A row's word is 0, or names its group by a hash, and the slot of a claimant whose record is not
 *    committed yet. Two groups of one hash share a row, which delays neither.
 *  - A group that has a row always passes: only a put that would begin another group waits.
 *  - Neither side can leave a row taken for ever. A claimant that died is proved by its slot's lock;
 *    whoever takes that slot settles its rows, and the collector frees settled rows whose group it
 *    does not have once it has read the ring to its end. */
#ifndef SHMBUS_RING_LEAD_H
#define SHMBUS_RING_LEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "segment.h"

enum lead_verdict {
    LEAD_KNOWN,   /* the group has a row */
    LEAD_CLAIMED, /* it has one now, of this claimant: settle it after the commit, or withdraw it */
    LEAD_FULL,
};

/* Whether a bound is in force: the one branch that a put on a bus without one takes. */
static inline bool lead_is_bounded(const struct segment *segment) {
    return atomic_load_explicit(&segment->lead->limit, memory_order_relaxed) != 0;
}

/* What a group is called here: a hash, its low bits empty. A prompt of two splits is two groups. */
uint64_t lead_key(const char *id, uint32_t id_bytes, int64_t round, uint32_t split);
/* The same of a key of split SHMBUS_SPLIT_TRAIN. */
uint64_t lead_key_of_split(uint64_t key, uint32_t split);

/* A producer, in the slot that it holds. */
enum lead_verdict lead_admit(struct segment *segment, uint64_t key, uint32_t slot);
/* Whether the group has a row; claims none. */
bool lead_knows(const struct segment *segment, uint64_t key);
void lead_settle(struct segment *segment, uint64_t key, uint32_t slot);
void lead_withdraw(struct segment *segment, uint64_t key, uint32_t slot);

/* Whoever has taken the slot of a claimant that died: what it committed counts by now. */
void lead_settle_all(struct segment *segment, uint32_t slot);

/* The collector: the group was delivered, or has ended otherwise. Whether it had a row. */
bool lead_leave(struct segment *segment, uint64_t key);
/* The word of a row if it is settled, else 0; and freeing a row that still has that word. */
uint64_t lead_settled(const struct segment *segment, uint32_t row);
void lead_free(struct segment *segment, uint32_t row, uint64_t word);
/* For a bound in versions: groups under lease, and those ended since the last call. */
void lead_follow(struct segment *segment, uint64_t leased, uint64_t ended);

/* Rows that are taken. */
uint32_t lead_held(const struct segment *segment);

#endif
