/* The collector's side: walks every lane, hands out records, frees what was released.
 *
 * Invariants:
 *  - One reader a segment, the holder of the collector's file lock. Its state is private memory;
 *    from shared memory it takes only what it has bounded.
 *  - A run is freed once it is sealed, walked to its end, without open reservation, without record
 *    in use (live), without writable view of a living producer (writer_pins), and without a view
 *    of a living borrower (SHMBUS_LOCK_VIEW).
 *  - Before a run is freed its link is taken or ended, so its owner never links to a freed run.
 *  - reader_release is atomic over death: all of its records are released, or none.
 */
#ifndef SHMBUS_RING_READER_H
#define SHMBUS_RING_READER_H

#include <stdbool.h>
#include <stdint.h>

#include "layout.h"
#include "record.h"
#include "segment.h"
#include "writer.h"

/* A record in the intent log: its extent above these bits, its offset in RECORD_ALIGN below. */
#define REF_OFFSET_BITS 40

struct record_ref {
    struct record_place place;
    uint64_t bytes;
};

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

struct seen_record {
    uint64_t producer_id, sequence;
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
    struct seen_record *moved; /* open addressing; producer_id 0 is empty */
    uint64_t moved_room, moved_count;
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

/* The caller holds the collector's lock. False when memory is short. */
bool reader_attach(struct reader *self, struct segment *segment);
void reader_detach(struct reader *self);

/* The next committed record, in self->copy: 1, none now: 0, memory short: -1. */
int reader_next(struct reader *self, struct record_ref *ref);

/* Whether some lane has moved since it was last visited. Makes no system call. */
bool reader_has_events(struct reader *self);

/* Ends n records for good, for one reason, atomically; n at most SHMBUS_MAX_GROUP_SIZE. Their
 * space is reused once they are let go too. */
void reader_release(struct reader *self, const struct record_ref *const *refs, uint32_t n,
                    enum shmbus_reason reason);

/* Tells waiting producers of what was freed. Small amounts are kept back until the reader has
 * nothing better to do: waking a producer for each extent would cost both more than it moves. */
void reader_announce_space(struct reader *self);

/* Holds a record's space, and lets it go. */
void reader_hold(struct reader *self, const struct record_ref *ref);
void reader_let_go(struct reader *self, const struct record_ref *ref);

/* Writes a record again in the collector's lane and ends the first copy; ref follows it. */
bool reader_move(struct reader *self, struct record_ref *ref);

/* Takes over the lanes of producers that are proved dead, and tidies. Returns how many producers
 * were found dead. */
uint32_t reader_sweep(struct reader *self);

/* Frees the runs that have ended and that no view keeps. On a bus that has lent, each run waits for
 * this until there are a share of the bus, or until the reader has nothing better to do: one system
 * call then tells of many. */
void reader_tidy(struct reader *self);
void reader_tidy_in_a_pause(struct reader *self);

/* Committed records that this reader has not handed out, by walking them; `committed` gets the
 * commits of all lanes as of the same instant. */
uint64_t reader_count_unread(struct reader *self, uint64_t *committed);

/* Within the collector's files only. */
void reader_try_free(struct reader *self, uint32_t extent);
bool reader_enter_run(struct reader *self, struct lane *lane, uint64_t link);
void reader_replay_intents(struct segment *segment);
bool reader_moved_insert(struct reader *self, uint64_t producer_id, uint64_t sequence);
bool reader_moved_contains(const struct reader *self, uint64_t producer_id, uint64_t sequence);
/* SYNC: slot-taken. Whether the owner of a reservation is known to be gone. */
bool reader_owner_gone(const struct reader *self, uint32_t slot, uint64_t producer_id);

#endif
