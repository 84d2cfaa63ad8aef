/* The collector's walk: it visits every lane and hands out the committed records.
 *
 * Invariant: one reader a segment, the holder of the collector's file lock. Its state is private
 * memory; values from shared memory enter only after a bounds check.
 *
 * A visit of one lane; reader_next leaves the visit with every record and resumes at the same
 * point:
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
 *     pending    Reservations seen open: the walk hands out those committed since.
 *     walking    Records from lane.cursor to lane.limit: a committed record is handed out, an
 *                open reservation becomes pending.
 *     at limit   a: the run is sealed and another follows, for the cursor to enter.
 *                b: `used` has grown, and the limit with it. Reservations ended before the
 *                   exposure of the new records come first.
 *     walking    c: a committed record, while pending reservations await another look. In a
 *                   batch, those were committed before the record. */
#pragma once

#include "ring/recovery.h"
#include "ring/writer.h"

/* ---- Records moved by an earlier collector: a first copy may exist too, which this set reveals. A
 * set of (producer, sequence); all-zero memory forms the empty set. */
struct moved_record {
    uint64_t producer_id; /* 0: empty entry */
    uint64_t sequence;
};

struct moved_set {
    struct moved_record *records;
    uint64_t room; /* 0 or a power of two */
    uint64_t count;
};

/* False if out of memory. */
bool moved_set_insert(struct moved_set *self, uint64_t producer_id, uint64_t sequence);
bool moved_set_contains(const struct moved_set *self, uint64_t producer_id, uint64_t sequence);
/* Frees the set's memory and leaves the set empty. */
void moved_set_clear(struct moved_set *self);

/* ---- The collector's knowledge of its bus: private memory shared by the files of the collector.
 *
 * Invariant: values from shared memory enter only after a bounds check. */
/* A run is unknown until a lane's cursor enters the run, and again after the run is freed. */
enum run_phase { RUN_UNKNOWN = 0, RUN_WALKING, RUN_WALKED };

/* State of one run, under the index of its first extent. */
struct run_state {
    uint64_t live_bytes; /* of the live records */
    uint32_t generation;
    uint32_t span; /* in extents */
    uint32_t slot; /* slot of its lane */
    uint32_t live; /* records handed out and not let go */
    uint32_t open; /* reservations seen and not ended */
    uint8_t phase; /* enum run_phase */
    bool parked;   /* in reader.parked: only views may still keep the run */
    bool unviewed; /* during reader_tidy: no borrower views the run */
};

/* A reservation open when the cursor passed. */
struct pending {
    uint64_t offset;
    uint64_t producer_id;
    uint32_t extent;
    uint32_t generation;
};

/* Counters of a producer's slot. */
struct slot_counters {
    uint64_t committed;
    uint64_t aborted;
    uint64_t next_order;
};

struct lane {
    uint32_t slot;   /* slot of the lane */
    uint32_t extent; /* the run under the cursor, or NO_EXTENT */

    bool dirty;     /* visit needed although no counter moved */
    bool visiting;  /* visit begun and not at the lane's end yet */
    bool cut;       /* bad frame in this run: the bytes after the frame cannot be reached */
    bool any_order; /* last_order valid, after the first entered run */

    uint64_t cursor;     /* of the next record, within the run */
    uint64_t limit;      /* exposed bytes of the run at the last read of `used` */
    uint64_t last_order; /* order of the last entered run; the next run's is greater */

    struct slot_counters seen;  /* at the start of the last completed visit: equal counters mean no
                                 * news */
    struct slot_counters visit; /* at the start of the present visit; become `seen` at its end */

    uint32_t *backlog; /* runs found at attach, in order; entered before the lane's links */
    uint32_t backlog_count, backlog_at;

    /* Reservations seen open, in order. During a pass, entries before `kept` are still open,
     * entries from `at` on await their second look, and the entries between are gone. */
    struct pending *pending;
    uint32_t pending_count, pending_room, pending_at, pending_kept;
};

struct reader {
    struct segment *segment;
    struct lane *lanes;     /* max_producers + 1; the last belongs to the collector */
    struct run_state *runs; /* extent_count */

    /* Round robin over the lanes worth a visit. */
    uint32_t *active;
    uint32_t active_count;
    bool active_outdated;  /* to choose again, whatever the attach epoch */
    bool read_once;        /* every lane read to its end since the attach */
    bool unsettled;        /* visit completed since the last comparison of the counters below */
    uint32_t turn;         /* position of the visited lane in active */
    uint32_t quota_left;   /* records until the next lane's turn */
    uint32_t attach_epoch; /* the header's epoch at the choice of active */

    struct writer mover;    /* the collector's own lane */
    uint32_t mover_run;     /* the run being filled, or NO_EXTENT */
    uint32_t sparse_at;     /* the extent from which the search for a sparse run continues */
    struct moved_set moved; /* records moved by an earlier collector */

    uint32_t *parked; /* ended runs that a view may keep */
    uint32_t parked_count;
    uint32_t parked_new;        /* parked extents not checked by reader_tidy yet */
    uint32_t freed_unannounced; /* freed extents not yet announced to waiting producers */

    /* Proof that no record is lost. Each lane counts its commits (promised). A commit was released
     * before this reader attached, or is met by this reader. Once every lane is read to its end,
     *
     *     promised == released_before + met
     *
     * and a deficit on the right counts as lost: released as corrupt. */
    uint64_t released_before; /* by earlier readers, for any reason */
    uint64_t promised;        /* the sum of seen.committed over the producers' lanes */
    uint64_t met;             /* commits delivered or quarantined by this reader */

    uint64_t delivered; /* records handed out */
    uint64_t corrupt;   /* records and losses quarantined by this reader */
    uint64_t moves;     /* records written again */
    uint64_t runs_freed;

    struct record_copy copy; /* of the record handed out by reader_next */
};

static inline struct record_header *record_of(const struct segment *segment,
                                              const struct record_place *place) {
    return (struct record_header *)(void *)(segment_extent(segment, place->extent) + place->offset);
}

/* Returns true if the owner of a reservation is known to be gone. */
static inline bool lane_owner_gone(const struct segment *segment, uint32_t slot,
                                   uint64_t producer_id) {
    const struct producer_slot *owner = &segment->slots[slot];
    /* SYNC: slot-taken. */
    return ACQUIRE(owner->state) != SHMBUS_SLOT_ACTIVE ||
           ACQUIRE(owner->producer_id) != producer_id;
}

/* ---- The walk. */
/* Reads the next committed record into self->copy. Returns 1, 0 without a record for now, -1 if out
 * of memory. */
int reader_next(struct reader *self, struct record_ref *ref);

/* Returns true if a lane has news since its last visit. Makes no system call. */
bool reader_has_events(struct reader *self);

/* ---- Return of space: a record holds its run, and a run without holders is freed.
 *
 * Invariants:
 *  - A run is freed once sealed and walked to its end, without open reservation, without record in
 *    use (live), without writable view of a living producer (writer_pins), and without a view of a
 *    living borrower (SHMBUS_LOCK_VIEW).
 *  - Before a run is freed, its link is taken or ended: the owner never links to a freed run. */
/* Holds a record's space, and releases the hold. */
void reader_hold(struct reader *self, const struct record_ref *ref);
void reader_let_go(struct reader *self, const struct record_ref *ref);

/* Frees a run without holders. */
void reader_try_free(struct reader *self, uint32_t extent);

/* Frees ended runs without views. On a bus with borrowers, ended runs wait for a certain share of
 * the bus or for an idle reader: one system call then checks many runs. */
void reader_tidy(struct reader *self);
void reader_tidy_in_a_pause(struct reader *self);

/* Wakes waiting producers after frees. Small amounts wait for an idle reader: a wake for every
 * extent would cost both sides more than its gain. */
void reader_announce_space(struct reader *self);

/* Returns true if a run is worth moving. */
bool reader_run_is_sparse(const struct reader *self, uint32_t extent);

/* Writes a record again in the collector's lane and ends the first copy; ref follows it. */
bool reader_move(struct reader *self, struct record_ref *ref);

/* Moves the lane's cursor to the run named by a link, if the run really comes next: orders grow
 * along a lane, so no forged link can make a loop, and a run is entered once, whatever links to the
 * run. */
bool lane_enter_run(struct reader *self, struct lane *lane, uint64_t link);

/* ---- Start and end of a collector, and its search for dead producers.
 *
 * Invariant: the collector first completes the intents of its predecessor, then the work of dead
 * producers, and only then counts or reads. */
/* The caller holds the collector's lock. False if out of memory. */
bool reader_attach(struct reader *self, struct segment *segment);
void reader_detach(struct reader *self);

/* Reaps dead producers by recover_dead (recovery.h), and tidies. Returns the number of dead
 * producers. */
uint32_t reader_sweep(struct reader *self, uint32_t most);

/* ---- The number of unread records, from a walk; for the proof that no record is lost. */
/* Committed records not handed out; `committed` receives the commits of every lane at the same
 * instant. */
uint64_t reader_count_unread(struct reader *self, uint64_t *committed);
