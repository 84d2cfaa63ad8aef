/* The clocks of clock.h. */
#define _GNU_SOURCE
#include "base/clock.h"

#include <time.h>

#define NS_PER_S UINT64_C(1000000000)

static uint64_t clock_ns(clockid_t clock) {
    struct timespec ts;
    clock_gettime(clock, &ts);
    return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

uint64_t clock_monotonic_ns(void) {
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t clock_realtime_ns(void) {
    return clock_ns(CLOCK_REALTIME);
}
