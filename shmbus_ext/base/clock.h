/* The two clocks, in nanoseconds: one to measure with, one to show people. */
#ifndef SHMBUS_BASE_CLOCK_H
#define SHMBUS_BASE_CLOCK_H

#include <stdint.h>

/* CLOCK_MONOTONIC: the same for every process of this boot, so it may stand in the segment. */
uint64_t clock_monotonic_ns(void);

/* CLOCK_REALTIME since 1970: for messages only, since it can be set. */
uint64_t clock_realtime_ns(void);

#endif
