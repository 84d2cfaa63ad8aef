/* The walk: reader_next -> visit_lane -> take_ended, and walk_lane -> walk_record, then deliver. */
#include "reader.h"

#include <stdlib.h>

#include "intent_log.h"

/* Records taken from one lane in a turn. With many lanes the quota grows, to bound the looks at
 * quiet lanes for each record. */
#define LANE_QUOTA 64u
#define LOOKS_A_RECORD 4u

/* Header, shapes, id and schema of a record with a few fields. */
#define HEAD_LINES 4u
#define LINE_BYTES 64u

static bool enter_backlog(struct reader *self, struct lane *lane) {
    while (lane->backlog_at < lane->backlog_count) {
        uint32_t extent = lane->backlog[lane->backlog_at++];
        uint64_t word = RELAXED(self->segment->extents[extent].word);
        if (lane_enter_run(self, lane, link_make(link_generation(word), extent + 1))) {
            return true;
        }
    }
    return false;
}

/* Moves the cursor from a fully walked run to the next run. False if no next run exists yet. */
static bool enter_next_run(struct reader *self, struct lane *lane) {
    struct producer_slot *slot = &self->segment->slots[lane->slot];
    if (lane->extent == NO_EXTENT) {
        return enter_backlog(self, lane) || lane_enter_run(self, lane, ACQUIRE(slot->first));
    }
    uint32_t done = lane->extent;
    struct extent_desc *desc = &self->segment->extents[done];
    self->runs[done].phase = RUN_WALKED;
    if (lane->backlog_at < lane->backlog_count) {
        lane->extent = NO_EXTENT;
        enter_backlog(self, lane);
        reader_try_free(self, done);
        return true;
    }
    /* SYNC: run-linked. */
    uint64_t next = ACQUIRE(desc->next);
    if (link_low(next) != 0) {
        /* A dead link ends the lane until its owner begins another chain. */
        lane->extent = NO_EXTENT;
        lane_enter_run(self, lane, next);
        reader_try_free(self, done);
        return true;
    }
    reader_try_free(self, done);
    return false;
}

static void end_open(struct reader *self, uint32_t extent) {
    self->runs[extent].open--;
    reader_try_free(self, extent);
}

static void make_ref(const struct reader *self, struct record_ref *ref,
                     const struct record_place *place) {
    ref->place = *place;
    ref->bytes = self->copy.header.record_bytes;
}

/* At the ends of all lanes: every promised commit not met counts as lost. */
static void count_lost(struct reader *self) {
    if (!self->unsettled) {
        return;
    }
    self->unsettled = false;
    if (self->promised > self->released_before + self->met) {
        uint64_t lost = self->promised - self->released_before - self->met;
        self->met += lost;
        self->corrupt += lost;
        atomic_fetch_add_explicit(&self->segment->header->released[SHMBUS_DROP_CORRUPT], lost,
                                  memory_order_relaxed);
    }
}

/* Counts an unreadable record as corrupt and releases it. */
static void quarantine(struct reader *self, const struct record_ref *ref) {
    self->corrupt++;
    reader_hold(self, ref);
    intent_log_release(self->segment, &ref, 1, SHMBUS_DROP_CORRUPT, SHMBUS_MAX_SPLITS);
    reader_let_go(self, ref);
}

/* Checks a committed record, under the cursor or pending. Returns 1 with the record in self->copy,
 * 0 for a skipped record, -1 if out of memory. */
static int deliver(struct reader *self, const struct record_place *place,
                   struct record_ref *ref) {
    const struct record_header *shared = record_of(self->segment, place);
    make_ref(self, ref, place);
    enum record_verdict verdict = record_read_body(shared, &self->copy);
    const struct record_header *header = &self->copy.header;
    bool moved = (header->flags & SHMBUS_FLAG_MOVED) != 0;
    if (verdict != RECORD_OK) {
        self->met++;
        quarantine(self, ref);
        return 0;
    }
    if (self->moved.count > 0 &&
        moved_set_contains(&self->moved, header->producer_id, header->sequence)) {
        /* The mover died between the two copies: skip the spare first copy. */
        SET_RELEASE(record_of(self->segment, place)->state, SHMBUS_RELEASED);
        return 0;
    }
    if (moved && !moved_set_insert(&self->moved, header->producer_id, header->sequence)) {
        return -1;
    }
    self->met++;
    reader_hold(self, ref);
    self->delivered++;
    return 1;
}

static bool remember_open(struct lane *lane, const struct record_place *place,
                          uint64_t producer_id) {
    if (lane->pending_count == lane->pending_room) {
        uint32_t room = lane->pending_room ? lane->pending_room * 2 : 16;
        struct pending *grown = realloc(lane->pending, room * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        lane->pending = grown;
        lane->pending_room = room;
    }
    lane->pending[lane->pending_count++] =
        (struct pending){place->offset, producer_id, place->extent, place->generation};
    return true;
}

/* The result of one step of the walk. */
enum walk {
    WALK_RECORD,        /* self->copy holds the next record */
    WALK_ON,            /* no record to hand out here: walk on */
    WALK_PENDING_FIRST, /* pending reservations precede the record under the cursor */
    WALK_END,           /* lane read to its present end */
    WALK_NO_MEMORY,
};

/* Prefetches the next record's head from its writer's cache, in parallel to the present
 * delivery. */
static inline void expect_next(const struct lane *lane, const struct record_header *record,
                               uint64_t record_bytes) {
    if (lane->cursor < lane->limit) {
        const char *next = (const char *)record + record_bytes;
        for (uint32_t i = 0; i < HEAD_LINES; i++) {
            __builtin_prefetch(next + (size_t)i * LINE_BYTES);
        }
    }
}

/* Reads the record under the cursor. */
static enum walk walk_record(struct reader *self, struct lane *lane, struct record_ref *ref) {
    const struct run_state *run = &self->runs[lane->extent];
    struct record_place place = {lane->extent, run->generation, lane->cursor};
    const struct record_header *record = record_of(self->segment, &place);
    enum record_verdict verdict = record_read_frame(record, lane->limit - lane->cursor, &place,
                                                    &self->copy.header);
    if (verdict != RECORD_OK) {
        lane->cut = true;
        return WALK_ON;
    }
    lane->cursor += self->copy.header.record_bytes;
    expect_next(lane, record, self->copy.header.record_bytes);
    const uint32_t state = RELAXED(self->copy.header.state);
    if (shmbus_is_committed(state)) {
        if (lane->pending_at < lane->pending_count) {
            /* A batch: its earlier records, still open a moment ago, were committed before this
             * record. */
            lane->cursor = place.offset;
            return WALK_PENDING_FIRST;
        }
        int delivered = deliver(self, &place, ref);
        if (delivered < 0) {
            lane->cursor = place.offset;
            return WALK_NO_MEMORY;
        }
        return delivered > 0 ? WALK_RECORD : WALK_ON;
    }
    switch (state) {
    case SHMBUS_RESERVED:
        if (!remember_open(lane, &place, self->copy.header.producer_id)) {
            lane->cursor = place.offset;
            return WALK_NO_MEMORY;
        }
        /* The end of a reservation moves a counter and triggers the next visit, except after its
         * owner's death. */
        self->runs[lane->extent].open++;
        lane->dirty = lane->dirty ||
                      lane_owner_gone(self->segment, lane->slot, self->copy.header.producer_id);
        return WALK_ON;
    case SHMBUS_RELEASED:
    case SHMBUS_ABORTED:
        return WALK_ON;
    default:
        /* Scribbled state: the lanes' counters reveal a lost commit. */
        SET_RELEASE(record_of(self->segment, &place)->state, SHMBUS_RELEASED);
        return WALK_ON;
    }
}

/* Moves the limit to the exposed bytes; returns true if records remain to walk. Pending
 * reservations come next: a reservation that ended before the exposure of a record below the limit
 * precedes the record. */
static bool look_further(struct reader *self, struct lane *lane) {
    uint64_t before = lane->limit;
    if (lane->extent != NO_EXTENT) {
        uint64_t run_bytes = self->runs[lane->extent].span * self->segment->extent_bytes;
        /* SYNC: record-exposed. */
        uint64_t used = ACQUIRE(self->segment->extents[lane->extent].used);
        lane->limit = used < run_bytes ? used : run_bytes;
    }
    lane->pending_at = lane->pending_kept = 0;
    return lane->limit > before;
}

/* One step from the cursor's position. */
static enum walk walk_lane(struct reader *self, struct lane *lane, struct record_ref *ref) {
    if (lane->extent == NO_EXTENT) {
        return enter_next_run(self, lane) ? WALK_ON : WALK_END;
    }
    if (lane->cursor < lane->limit && !lane->cut) {
        return walk_record(self, lane, ref);
    }
    /* SYNC: run-sealed. Read before `used`: in a sealed run `used` is final. */
    bool sealed = ACQUIRE(self->segment->extents[lane->extent].sealed) != 0;
    if (!lane->cut && look_further(self, lane)) {
        return WALK_PENDING_FIRST;
    }
    if (!sealed && lane->backlog_at >= lane->backlog_count) {
        return WALK_END;
    }
    return enter_next_run(self, lane) ? WALK_ON : WALK_END;
}

/* Delivers the next committed pending reservation in the lane's order, to hand out a half-seen
 * batch in its order. Returns 1 with the record in self->copy, 0 if no such reservation remains, -1
 * if out of memory. */
static int take_ended(struct reader *self, struct lane *lane, struct record_ref *ref) {
    while (lane->pending_at < lane->pending_count) {
        struct pending *entry = &lane->pending[lane->pending_at];
        struct record_place place = {entry->extent, entry->generation, entry->offset};
        struct record_header *shared = record_of(self->segment, &place);
        uint32_t state = ACQUIRE(shared->state);
        if (state == SHMBUS_RESERVED &&
            lane_owner_gone(self->segment, self->runs[entry->extent].slot, entry->producer_id)) {
            atomic_compare_exchange_strong_explicit(&shared->state, &state, SHMBUS_ABORTED,
                                                    memory_order_acq_rel, memory_order_acquire);
        }
        state = ACQUIRE(shared->state);
        lane->pending_at++;
        if (state == SHMBUS_RESERVED) {
            lane->pending[lane->pending_kept++] = *entry;
            continue;
        }
        uint64_t room = self->runs[place.extent].span * self->segment->extent_bytes - place.offset;
        int delivered = 0;
        if (record_read_frame(shared, room, &place, &self->copy.header) == RECORD_OK &&
            shmbus_is_committed(state)) {
            delivered = deliver(self, &place, ref);
        }
        if (delivered < 0) {
            lane->pending_at--;
            return delivered;
        }
        end_open(self, place.extent);
        if (delivered != 0) {
            return delivered;
        }
    }
    lane->pending_at = lane->pending_count = lane->pending_kept;
    return 0;
}

static void end_visit(struct reader *self, struct lane *lane) {
    if (lane->slot < self->segment->max_producers) {
        self->promised += lane->visit.committed - lane->seen.committed;
        self->unsettled = true;
    }
    lane->visiting = false;
    lane->seen = lane->visit;
}

/* An owner facing a full bus seals its run without a commit: no counter moves. */
static bool sealed_since(const struct reader *self, const struct lane *lane) {
    return lane->extent != NO_EXTENT && self->runs[lane->extent].phase == RUN_WALKING &&
           ACQUIRE(self->segment->extents[lane->extent].sealed) != 0;
}

/* SYNC: lane-advanced. Returns true if the lane's owners ended records since the last visit. */
static bool counters_moved(const struct lane *lane, const struct producer_slot *slot) {
    return ACQUIRE(slot->committed) != lane->seen.committed ||
           ACQUIRE(slot->aborted) != lane->seen.aborted;
}

/* Returns true if a visit would find no news, after a few loads. */
static bool is_quiet(const struct reader *self, const struct lane *lane) {
    return !lane->visiting && !lane->dirty &&
           !counters_moved(lane, &self->segment->slots[lane->slot]) &&
           !sealed_since(self, lane);
}

static void begin_visit(struct reader *self, struct lane *lane) {
    const struct producer_slot *slot = &self->segment->slots[lane->slot];
    lane->visiting = true;
    lane->dirty = false;
    /* SYNC: lane-advanced. */
    lane->visit.committed = ACQUIRE(slot->committed);
    lane->visit.aborted = ACQUIRE(slot->aborted);
    lane->visit.next_order = ACQUIRE(slot->next_order);
    (void)look_further(self, lane);
}

/* The lane's next record: returns 1, 0 or -1, like reader_next. */
static int visit_lane(struct reader *self, struct lane *lane, struct record_ref *ref) {
    if (!lane->visiting) {
        begin_visit(self, lane);
    }
    for (;;) {
        int ended = take_ended(self, lane, ref);
        if (ended != 0) {
            return ended;
        }
        enum walk next;
        while ((next = walk_lane(self, lane, ref)) == WALK_ON) {
        }
        switch (next) {
        case WALK_RECORD:
            return 1;
        case WALK_NO_MEMORY:
            return -1;
        case WALK_END:
            end_visit(self, lane);
            return 0;
        default:
            break;
        }
    }
}

/* Returns true if a lane may hold unread records; a free slot proves no end, since a successor may
 * have died. */
static bool worth_a_visit(const struct lane *lane, const struct producer_slot *slot) {
    return ACQUIRE(slot->state) != SHMBUS_SLOT_FREE || lane->extent != NO_EXTENT || lane->dirty ||
           lane->pending_count > 0 || lane->backlog_at < lane->backlog_count ||
           counters_moved(lane, slot) || ACQUIRE(slot->next_order) != lane->seen.next_order;
}

/* The set of lanes to visit changes with arriving and leaving producers, and with fully read
 * lanes. */
static void refresh_active(struct reader *self) {
    uint32_t epoch = ACQUIRE(self->segment->header->attach_epoch);
    if (epoch == self->attach_epoch && !self->active_outdated) {
        return;
    }
    self->attach_epoch = epoch;
    self->active_count = 0;
    self->active_outdated = false;
    for (uint32_t i = 0; i < self->segment->max_producers; i++) {
        struct lane *lane = &self->lanes[i];
        if (worth_a_visit(lane, &self->segment->slots[i])) {
            lane->dirty = true;
            self->active[self->active_count++] = i;
        }
    }
    if (self->turn >= self->active_count) {
        self->turn = 0;
    }
}

int reader_next(struct reader *self, struct record_ref *ref) {
    struct lane *own = &self->lanes[self->segment->max_producers];
    if (own->dirty || own->visiting) {
        /* Read the moves of an earlier collector first: they identify spare first copies. */
        int found = visit_lane(self, own, ref);
        if (found != 0) {
            return found;
        }
        /* From here on this reader writes to the lane itself. */
        own->extent = NO_EXTENT;
    }
    refresh_active(self);
    for (uint32_t idle = 0; idle < self->active_count;) {
        if (self->quota_left > 0) {
            struct lane *lane = &self->lanes[self->active[self->turn]];
            int found = is_quiet(self, lane) ? 0 : visit_lane(self, lane, ref);
            if (found != 0) {
                self->quota_left--;
                return found;
            }
            idle++;
        }
        self->turn = self->turn + 1 < self->active_count ? self->turn + 1 : 0;
        uint32_t share = self->active_count / LOOKS_A_RECORD;
        self->quota_left = share > LANE_QUOTA ? share : LANE_QUOTA;
    }
    count_lost(self);
    if (!self->read_once) {
        /* Most lanes needed only the first visit after the attach: their producers have left. */
        self->read_once = true;
        self->active_outdated = true;
    }
    return 0;
}

bool reader_has_events(struct reader *self) {
    reader_announce_space(self);
    const struct bus_header *header = self->segment->header;
    if (ACQUIRE(header->attach_epoch) != self->attach_epoch ||
        self->lanes[self->segment->max_producers].dirty) {
        return true;
    }
    for (uint32_t i = 0; i < self->active_count; i++) {
        if (!is_quiet(self, &self->lanes[self->active[i]])) {
            return true;
        }
    }
    return false;
}
