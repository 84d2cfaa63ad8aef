/* Two clocks in nanoseconds: monotonic for measurements, real time for display. */
#pragma once

#include <stdint.h>

/* CLOCK_MONOTONIC: shared by the processes of a boot, and thus valid in the segment. */
uint64_t clock_monotonic_ns(void);

/* CLOCK_REALTIME since 1970: only for messages, because the clock can be set. */
uint64_t clock_realtime_ns(void);
