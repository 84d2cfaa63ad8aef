/* Sleeping and waking across processes: one futex word each way.
 *
 * Invariant of the bell: a reader that sleeps has stored 1 before it looked for records one last
 * time; a producer that published looks at the bell afterwards. Both are sequentially consistent,
 * so at least one of them sees the other, and no wake-up is lost. While nobody sleeps, neither
 * side makes a system call. */
#ifndef SHMBUS_RING_DOORBELL_H
#define SHMBUS_RING_DOORBELL_H

#include <stdbool.h>
#include <stdint.h>

#include "layout.h"

enum doorbell_wait { DOORBELL_WOKEN = 0, DOORBELL_TIMEOUT = 1, DOORBELL_INTERRUPTED = 2 };

/* Producer, after it has published. Whether it woke a reader. */
bool doorbell_ring(struct bus_header *header);

/* What the bell says. */
enum doorbell_state { BELL_AWAKE = 0, BELL_ANNOUNCED = 1 };

/* Reader: announce sleep, look again, then doorbell_sleep or doorbell_stay. */
void doorbell_announce(struct bus_header *header);
void doorbell_stay(struct bus_header *header);
enum doorbell_wait doorbell_sleep(struct bus_header *header, int64_t timeout_ns);

/* Producer: announce the wish for space, try again, then sleep. Returns the ticket to sleep on. */
uint32_t doorbell_want_space(struct bus_header *header);
enum doorbell_wait doorbell_await_space(struct bus_header *header, uint32_t ticket,
                                        int64_t timeout_ns);

/* After so many extents were freed: wakes as many waiters, since one more would find nothing. */
void doorbell_space_freed(struct bus_header *header, uint32_t extents);
/* Wakes every process that waits for space, announced or not. */
void doorbell_space_all(struct bus_header *header);
/* The same where anybody has announced it: more than extents may let a producer go on. */
void doorbell_space_changed(struct bus_header *header);

/* A bell of several sleepers: announce, look again, then sleep on the ticket. Ringing wakes at most
 * so many of them. */
uint32_t shared_bell_want(struct shmbus_bell *bell);
enum doorbell_wait shared_bell_await(struct shmbus_bell *bell, uint32_t ticket, int64_t timeout_ns);
void shared_bell_ring(struct shmbus_bell *bell, uint32_t most);

#endif
