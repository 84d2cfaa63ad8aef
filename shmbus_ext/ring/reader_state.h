/* What a collector knows of its bus: private memory that the files of the collector share.
 *
 * reader.h has the walk, reclaim.h a lane's cursor and what is freed, attach.h fills this in,
 * count.h counts.
 *
 * Invariant: nothing here is read from shared memory without a bound. */
#ifndef SHMBUS_RING_READER_STATE_H
#define SHMBUS_RING_READER_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "moved_set.h"
#include "record.h"
#include "segment.h"
#include "writer.h"

/* A run is unknown until a lane's cursor enters it, and after it is freed. */
enum run_phase { RUN_UNKNOWN = 0, RUN_WALKING, RUN_WALKED };

/* One run, under the index of its first extent. */
struct run_state {
    uint64_t live_bytes; /* of the live records */
    uint32_t generation;
    uint32_t span; /* in extents */
    uint32_t slot; /* whose lane it belongs to */
    uint32_t live; /* records handed out and not let go */
    uint32_t open; /* reservations seen and not ended */
    uint8_t phase; /* enum run_phase */
    bool parked;   /* in reader.parked: only views keep it, if anything does */
    bool unviewed; /* within reader_tidy: no borrower looks at it */
};

/* A reservation that was open when the cursor passed it. */
struct pending {
    uint64_t offset;
    uint64_t producer_id;
    uint32_t extent;
    uint32_t generation;
};

/* What a producer's slot counts. */
struct slot_counters {
    uint64_t committed;
    uint64_t aborted;
    uint64_t next_order;
};

struct lane {
    uint32_t slot;   /* whose lane it is */
    uint32_t extent; /* the run under the cursor, or NO_EXTENT */

    bool dirty;     /* a visit is needed although no counter has moved */
    bool visiting;  /* a visit has begun and has not reached the lane's end */
    bool cut;       /* a bad frame in this run: what lies behind it cannot be reached */
    bool any_order; /* a run was entered, so last_order counts */

    uint64_t cursor;     /* of the next record, within the run */
    uint64_t limit;      /* the bytes of the run that were exposed when `used` was last read */
    uint64_t last_order; /* of the run that was entered last: the next one's is greater */

    struct slot_counters seen;  /* when the last completed visit began: equal ones mean no news */
    struct slot_counters visit; /* when the present visit began: they become `seen` at its end */

    uint32_t *backlog; /* runs found at attach, in order; entered before any link is followed */
    uint32_t backlog_count, backlog_at;

    /* Reservations that were seen open, in order. Within a pass over them, those before `kept` are
     * still open, those from `at` on have not been looked at again, and those between are gone. */
    struct pending *pending;
    uint32_t pending_count, pending_room, pending_at, pending_kept;
};

struct reader {
    struct segment *segment;
    struct lane *lanes;     /* max_producers + 1; the last is the collector's own */
    struct run_state *runs; /* extent_count */

    /* Round robin over the lanes that are worth a visit. */
    uint32_t *active;
    uint32_t active_count;
    bool active_outdated;  /* to be chosen again, whatever the attach epoch */
    bool read_once;        /* every lane was read to its end since the attach */
    bool unsettled;        /* a visit was completed since the counters below were compared */
    uint32_t turn;         /* position in active of the lane that is visited */
    uint32_t quota_left;   /* records until the next lane has its turn */
    uint32_t attach_epoch; /* of the header, when active was chosen */

    struct writer mover;    /* the collector's own lane */
    uint32_t mover_run;     /* the run that it fills, or NO_EXTENT */
    struct moved_set moved; /* records that an earlier collector moved */

    uint32_t *parked; /* runs that have ended, and that a view may keep */
    uint32_t parked_count;
    uint32_t parked_new;        /* extents of those that reader_tidy has not looked at */
    uint32_t freed_unannounced; /* extents that waiting producers were not told of */

    /* The proof that nothing is lost. Each commit is counted by its lane (promised). It was
     * released before this reader attached, or is met by it. Once all lanes are read to their ends,
     *
     *     promised == released_before + met
     *
     * and what is missing on the right is lost: released as corrupt. */
    uint64_t released_before; /* by earlier readers, for whatever reason */
    uint64_t promised;        /* the sum of seen.committed over the producers' lanes */
    uint64_t met;             /* commits that this reader delivered or quarantined */

    uint64_t delivered; /* records handed out */
    uint64_t corrupt;   /* records and losses quarantined by this reader */
    uint64_t moves;     /* records written again */
    uint64_t runs_freed;

    struct record_copy copy; /* of the record that reader_next handed out */
};

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

#endif
