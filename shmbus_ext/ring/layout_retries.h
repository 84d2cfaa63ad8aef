/* The part of the segment that asks producers for single samples again: layout.h includes this, and
 * nothing else does. */
#ifndef SHMBUS_RING_LAYOUT_RETRIES_H
#define SHMBUS_RING_LAYOUT_RETRIES_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Open retry requests: a failing fleet is not helped by more. */
#define SHMBUS_RETRY_ENTRIES 128u
#define SHMBUS_RETRY_ID_BYTES 256u
#define SHMBUS_RETRY_REASON_BYTES 192u

/* A retry request. `claim` is FREE, BUSY while the collector changes the entry, or the id of the
 * producer that has claimed it, plus 1.
 *
 * Offset  Size  Field        Written by             Read by    Order
 *      0     8  claim        collector, producers   both       CAS; BUSY first, FREE last
 *      8     8  number       collector              producers  0 for no request
 *     16    40  ...          collector              producers  before claim
 *     60     4  crc          collector              producers  over 8..60 and 64..512
 */
#define SHMBUS_RETRY_FREE UINT64_C(0)
#define SHMBUS_RETRY_BUSY UINT64_MAX
/* The `attempt` of the row that pauses the request lane, and asks for no sample. `reason` says why,
 * `round` since when (CLOCK_REALTIME, ns), `id` nothing. While there is one, a worker takes a sample
 * only once it has claimed that row; the collector publishes it anew for each. */
#define SHMBUS_RETRY_PAUSE UINT32_MAX
struct retry_entry {
    alignas(64) _Atomic uint64_t claim;
    uint64_t number;
    int64_t round;
    uint64_t asked_ns; /* CLOCK_MONOTONIC */
    uint32_t group_size;
    uint32_t index;
    uint32_t attempt;
    uint16_t id_bytes;
    uint16_t reason_bytes;
    uint16_t need;
    uint16_t split;
    uint32_t reserved0[2];
    uint32_t crc;
    char id[SHMBUS_RETRY_ID_BYTES];
    char reason[SHMBUS_RETRY_REASON_BYTES];
};
_Static_assert(sizeof(struct retry_entry) == 512, "layout");
_Static_assert(offsetof(struct retry_entry, number) == 8, "layout");
_Static_assert(offsetof(struct retry_entry, need) == 48, "layout");
_Static_assert(offsetof(struct retry_entry, crc) == 60, "layout");
_Static_assert(offsetof(struct retry_entry, id) == 64, "layout");

#endif
