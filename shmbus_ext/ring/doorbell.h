/* The collector's bell: producers wake a collector that sleeps. It is one word, and the collector is
 * alone, so that whoever rings clears it and wakes in one step.
 *
 * Invariant of the bell: a reader that sleeps has stored 1 before it looked for records one last
 * time; a producer that published looks at the bell afterwards. Both are sequentially consistent,
 * so at least one of them sees the other, and no wake-up is lost. While nobody sleeps, neither
 * side makes a system call. */
#ifndef SHMBUS_RING_DOORBELL_H
#define SHMBUS_RING_DOORBELL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bell.h"
#include "layout.h"

/* Producer, after it has published. Whether it woke a reader. */
bool doorbell_ring(struct bus_header *header);

/* What the bell says. */
enum doorbell_state { BELL_AWAKE = 0, BELL_ANNOUNCED = 1 };

/* Reader: announce sleep, look again, then doorbell_sleep or doorbell_stay. */
void doorbell_announce(struct bus_header *header);
void doorbell_stay(struct bus_header *header);
enum bell_wait doorbell_sleep(struct bus_header *header, int64_t timeout_ns);

#endif
