/* What a collector knows of its bus: private memory, shared by the files that work on it.
 *
 * reader.c walks, reclaim.c gives back, attach.c begins, count.c counts; lane.h has the cursor. */
#ifndef SHMBUS_RING_READER_STATE_H
#define SHMBUS_RING_READER_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "moved_set.h"
#include "record.h"
#include "segment.h"
#include "writer.h"

enum run_phase { RUN_UNKNOWN = 0, RUN_WALKING, RUN_WALKED };

struct run_state {
    uint64_t live_bytes;
    uint32_t generation;
    uint32_t span;
    uint32_t slot;
    uint32_t live; /* records handed out and not let go */
    uint32_t open; /* reservations seen and not ended */
    uint8_t phase;
    bool parked;   /* in reader.parked: only views keep it, if anything does */
    bool unviewed; /* within reader_tidy: no borrower looks at it */
};

struct pending {
    uint64_t offset;
    uint64_t producer_id;
    uint32_t extent;
    uint32_t generation;
};

struct lane {
    uint32_t slot;   /* whose lane it is */
    uint32_t extent; /* the run under the cursor, or NO_EXTENT */
    bool dirty;      /* must be visited whatever the counters say */
    bool visiting;
    bool cut; /* a bad frame: the rest of this run cannot be walked */
    bool any_order;
    uint64_t cursor;
    uint64_t limit; /* of what was exposed in this run at the last look */
    uint64_t last_order;
    /* The slot's counters at the last visit that came to the end, and at the present one. */
    uint64_t seen_committed, seen_aborted, seen_order;
    uint64_t visit_committed, visit_aborted, visit_order;
    uint32_t *backlog; /* runs found at attach, in order */
    uint32_t backlog_count, backlog_at;
    /* Reservations seen open, in order. In a visit: those before `kept` are still open, from `at` on
     * they are to be looked at, and between the two there is nothing. */
    struct pending *pending;
    uint32_t pending_count, pending_room, pending_at, pending_kept;
};

struct reader {
    struct segment *segment;
    struct lane *lanes;     /* max_producers + 1 */
    struct run_state *runs; /* extent_count */
    uint32_t *active;       /* lanes worth a visit */
    uint32_t active_count;
    bool active_outdated; /* to be chosen anew, whatever the epoch */
    bool read_once;       /* every lane was read to its end since the attach */
    bool unsettled;       /* some lane was, since the counters were compared */
    uint32_t turn;       /* position in active of the lane that is visited */
    uint32_t quota_left;
    uint32_t attach_epoch;
    struct writer mover; /* the collector's own lane */
    uint32_t mover_run;
    struct moved_set moved; /* records that an earlier collector moved */
    uint32_t *parked;
    uint32_t parked_count;
    uint32_t parked_new; /* extents of those that reader_tidy has not looked at */
    /* Proof that nothing is lost: what was released before this reader came, and the commits that
     * it has met since. When all is read, they are what the lanes' counters promise. */
    uint64_t released_before, met;
    uint64_t promised;     /* the sum of seen_committed over the producers' lanes */
    uint64_t delivered;    /* records handed out */
    uint64_t corrupt;      /* records and losses quarantined by this reader */
    uint64_t moves;        /* records written again */
    uint64_t runs_freed;
    uint32_t freed_unannounced; /* extents that waiting producers were not told of */
    struct record_copy copy; /* of the record that reader_next handed out */
};

#endif
