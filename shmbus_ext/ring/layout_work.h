/* Of layout.h: who has begun which sample, and how long whom has waited. For messages only.
 *
 * Invariant: nothing that delivers reads these parts; what is lost of them costs a word on a page. */
#ifndef SHMBUS_RING_LAYOUT_WORK_H
#define SHMBUS_RING_LAYOUT_WORK_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Samples that are noted as begun at once: as many as the largest fleets sample at a time. One more
 * is not noted. */
#define SHMBUS_BEGUN_ROWS 4096u

/* A sample that a producer has begun and not put yet. A row is its owner's alone until it is 0
 * again; whoever takes a dead owner's slot frees its rows.
 *
 * Offset  Size  Field     Written by         Read by  Order
 *      0     8  owner     producer, reaper   all      CAS: producer id << 1, the low bit once the
 *                                                     rest is written; 0 for a free row
 *      8     8  key       producer           all      before owner: group's id, round, split (hash)
 *     16     8  begun_ns  producer           all      before owner; CLOCK_MONOTONIC
 *     24     4  index     producer           all      before owner
 */
struct begun_row {
    alignas(32) _Atomic uint64_t owner;
    _Atomic uint64_t key;
    _Atomic uint64_t begun_ns;
    _Atomic uint32_t index;
    uint32_t reserved0;
};
_Static_assert(sizeof(struct begun_row) == 32, "layout");
_Static_assert(offsetof(struct begun_row, key) == 8, "layout");
_Static_assert(offsetof(struct begun_row, begun_ns) == 16, "layout");
_Static_assert(offsetof(struct begun_row, index) == 24, "layout");

/* What is waited for. */
enum shmbus_wait {
    SHMBUS_WAIT_SPACE = 0,  /* by producers: the ring is full */
    SHMBUS_WAIT_PAUSED = 1, /* by producers: the bus is paused */
    SHMBUS_WAIT_AHEAD = 2,  /* by producers: no further group may begin */
    SHMBUS_WAIT_GROUPS = 3, /* by trainers that hold none */
    SHMBUS_WAITS = 4,
};

/* Nanoseconds that the owners of a slot have waited, of all its owners so far; the collector's slot
 * has those of trainers.
 *
 * Offset  Size  Field  Written by         Read by  Order
 *      0    32  ns     owner, collector   all      relaxed
 */
struct wait_row {
    alignas(64) _Atomic uint64_t ns[SHMBUS_WAITS];
    uint64_t reserved0[4];
};
_Static_assert(sizeof(struct wait_row) == 64, "a cache line a slot");

#endif
