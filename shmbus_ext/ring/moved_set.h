/* The records that an earlier collector moved: of each there may be a first copy too, which this
 * set tells. A set of (producer, sequence); all zero is the empty one. */
#ifndef SHMBUS_RING_MOVED_SET_H
#define SHMBUS_RING_MOVED_SET_H

#include <stdbool.h>
#include <stdint.h>

struct moved_record {
    uint64_t producer_id; /* 0 where none is */
    uint64_t sequence;
};

struct moved_set {
    struct moved_record *records;
    uint64_t room; /* 0 or a power of two */
    uint64_t count;
};

/* False when memory is short. */
bool moved_set_insert(struct moved_set *self, uint64_t producer_id, uint64_t sequence);
bool moved_set_contains(const struct moved_set *self, uint64_t producer_id, uint64_t sequence);
/* Frees what it holds; it is empty then. */
void moved_set_clear(struct moved_set *self);

#endif
