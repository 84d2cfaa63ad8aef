/* The feeders' side of the request lane: any process may offer, one at a time.
 *
 * Invariants:
 *  - Rows, and the room of cells and prompts, are given out and taken back only under the feeders'
 *    lock, which the kernel drops with its holder. `feeding` says that one was at work: whoever gets
 *    the lock then finishes what it left, from the rows alone, so that nothing leaks.
 *  - A row is whole before it is open, and open before workers find it in the order.
 *  - Nothing here waits: a full lane, and a lock that is held, are answers. */
#ifndef SHMBUS_RING_REQUEST_FEED_H
#define SHMBUS_RING_REQUEST_FEED_H

#include <stdbool.h>
#include <stdint.h>

#include "segment.h"

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
/* Offers up to REQUEST_OFFERS_AT_ONCE groups, in order, and rings once. `done` counts those that
 * are offered; their numbers are consecutive, and `number` is the last one's. */
enum request_feed request_offer(struct segment *segment, const struct request_offer *offers,
                                uint32_t count, uint32_t *done, uint64_t *number);

/* Ends what a dead feeder left, if there is anything; for the collector. */
void request_heal(struct segment *segment);

/* Bytes of prompts that are free; a hint. */
uint64_t request_free_bytes(const struct segment *segment);

#endif
