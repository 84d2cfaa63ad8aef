/* The collector's walk: it visits every lane and hands out the records that are committed there.
 *
 * Invariant: one reader a segment, the holder of the collector's file lock. Its state is private
 * memory; from shared memory it takes only what it has bounded.
 *
 * A visit of one lane; reader_next leaves it with each record, and comes back to where it was:
 *
 *     quiet ----(begin_visit)----> pending <----------.
 *       ^                             | none is left  |
 *       |                             v               | b, c
 *       |                   .----> walking -----------+
 *       |                 a |         | at the limit  |
 *       |                   |         v               |
 *       '-----(end_visit)---+----- at limit ----------'
 *
 *     quiet      No counter of the slot has moved since the last visit; begin_visit notes them.
 *     pending    Reservations that were seen open: each that was committed since is handed out.
 *     walking    Records from lane.cursor to lane.limit: each committed one is handed out, each
 *                open reservation becomes a pending one.
 *     at limit   a: the run is sealed and another follows, which the cursor enters.
 *                b: `used` has grown, and with it the limit. What was ended before the new records
 *                   were exposed comes before those.
 *     walking    c: a committed record while pending ones have not been looked at since. Of a
 *                   batch, those were committed before it.
 */
#ifndef SHMBUS_RING_READER_H
#define SHMBUS_RING_READER_H

#include <stdbool.h>
#include <stdint.h>

#include "ring/recovery.h"
#include "ring/writer.h"

/* ---- The records that an earlier collector moved: of each there may be a first copy too, which this
 * set tells. A set of (producer, sequence); all zero is the empty one. */
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

/* ---- What a collector knows of its bus: private memory that the files of the collector share.
 *
 * Invariant: nothing here is read from shared memory without a bound. */
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
    uint32_t sparse_at;     /* the extent at which the search for a sparse run goes on */
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

/* ---- The walk. */
/* The next committed record, in self->copy: 1; none for now: 0; memory is short: -1. */
int reader_next(struct reader *self, struct record_ref *ref);

/* Whether some lane has news since its last visit. Makes no system call. */
bool reader_has_events(struct reader *self);

/* ---- How space comes back: a record holds its run, and a run that nothing holds is freed.
 *
 * Invariants:
 *  - A run is freed once it is sealed, walked to its end, without open reservation, without record
 *    in use (live), without writable view of a living producer (writer_pins), and without a view
 *    of a living borrower (SHMBUS_LOCK_VIEW).
 *  - Before a run is freed its link is taken or ended, so its owner never links to a freed run. */
/* Holds a record's space, and lets it go. */
void reader_hold(struct reader *self, const struct record_ref *ref);
void reader_let_go(struct reader *self, const struct record_ref *ref);

/* Frees a run if nothing holds it any more. */
void reader_try_free(struct reader *self, uint32_t extent);

/* Frees the runs that have ended and that no view keeps. On a bus that has lent, they wait until they
 * are a share of the bus, or the reader is idle: one system call then tells of many. */
void reader_tidy(struct reader *self);
void reader_tidy_in_a_pause(struct reader *self);

/* Wakes waiting producers for what was freed. Small amounts are kept back until the reader is idle:
 * waking a producer for each extent would cost both sides more than it gains. */
void reader_announce_space(struct reader *self);

/* Whether a run is worth moving. */
bool reader_run_is_sparse(const struct reader *self, uint32_t extent);

/* Writes a record again in the collector's lane and ends the first copy; ref follows it. */
bool reader_move(struct reader *self, struct record_ref *ref);

/* Puts the lane's cursor on the run that a link names, if it really is the lane's next: orders grow
 * along a lane, so no forged link can make a loop, and a run is entered once, whatever links to it. */
bool lane_enter_run(struct reader *self, struct lane *lane, uint64_t link);

/* ---- How a collector begins, how it ends, and how it looks for dead producers.
 *
 * Invariant: what an earlier collector intended is ended first, then what dead producers left, and
 * only then is anything counted or read. */
/* The caller holds the collector's lock. False when memory is short. */
bool reader_attach(struct reader *self, struct segment *segment);
void reader_detach(struct reader *self);

/* Reaps dead producers as recover_dead does (recovery.h), and tidies; how many there were. */
uint32_t reader_sweep(struct reader *self, uint32_t most);

/* ---- How many records are still unread, by walking them; for the proof that nothing is lost. */
/* Committed records not handed out; `committed` has all lanes' commits of that instant. */
uint64_t reader_count_unread(struct reader *self, uint64_t *committed);

#endif
