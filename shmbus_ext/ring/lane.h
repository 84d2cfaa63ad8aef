/* A lane's cursor: on which run it stands, and who owns what lies there.
 *
 * Invariant: orders grow along a lane, so no forged link can make a loop; and a run is entered
 * once, whatever links to it. */
#ifndef SHMBUS_RING_LANE_H
#define SHMBUS_RING_LANE_H

#include <stdbool.h>
#include <stdint.h>

#include "reader_state.h"

static inline struct record_header *record_of(const struct segment *segment,
                                              const struct record_place *place) {
    return (struct record_header *)(void *)(segment_extent(segment, place->extent) + place->offset);
}

/* Whether the owner of a reservation is known to be gone. */
static inline bool lane_owner_gone(const struct segment *segment, uint32_t slot,
                                   uint64_t producer_id) {
    const struct producer_slot *owner = &segment->slots[slot];
    /* SYNC: slot-taken. */
    return atomic_load_explicit(&owner->state, memory_order_acquire) != SHMBUS_SLOT_ACTIVE ||
           atomic_load_explicit(&owner->producer_id, memory_order_acquire) != producer_id;
}

/* Puts the lane's cursor on the run that a link names, if it really is the lane's next. */
bool lane_enter_run(struct reader *self, struct lane *lane, uint64_t link);

#endif
