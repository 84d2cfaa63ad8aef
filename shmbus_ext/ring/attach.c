/* How a collector finds what is there: attach, the dead, and the count of what is unread. */
#include <stdlib.h>
#include <string.h>

#include "failpoints.h"
#include "reader.h"

static uint64_t mix(uint64_t producer_id, uint64_t sequence) {
    uint64_t h = producer_id * UINT64_C(0x9E3779B97F4A7C15) ^ sequence;
    h *= UINT64_C(0xBF58476D1CE4E5B9);
    return h ^ (h >> 29);
}

static struct seen_record *moved_place(const struct reader *self, uint64_t producer_id,
                                       uint64_t sequence) {
    uint64_t mask = self->moved_room - 1;
    for (uint64_t i = mix(producer_id, sequence) & mask;; i = (i + 1) & mask) {
        struct seen_record *at = &self->moved[i];
        if (at->producer_id == 0 ||
            (at->producer_id == producer_id && at->sequence == sequence)) {
            return at;
        }
    }
}

static bool moved_grow(struct reader *self) {
    struct reader bigger = *self;
    bigger.moved_room = self->moved_room ? self->moved_room * 2 : 256;
    bigger.moved = calloc(bigger.moved_room, sizeof *bigger.moved);
    if (bigger.moved == NULL) {
        return false;
    }
    for (uint64_t i = 0; i < self->moved_room; i++) {
        struct seen_record *entry = &self->moved[i];
        if (entry->producer_id != 0) {
            *moved_place(&bigger, entry->producer_id, entry->sequence) = *entry;
        }
    }
    free(self->moved);
    self->moved = bigger.moved;
    self->moved_room = bigger.moved_room;
    return true;
}

bool reader_moved_insert(struct reader *self, uint64_t producer_id, uint64_t sequence) {
    if (self->moved_count * 2 >= self->moved_room && !moved_grow(self)) {
        return false;
    }
    struct seen_record *at = moved_place(self, producer_id, sequence);
    *at = (struct seen_record){producer_id, sequence};
    self->moved_count++;
    return true;
}

bool reader_moved_contains(const struct reader *self, uint64_t producer_id, uint64_t sequence) {
    return self->moved_room > 0 && producer_id != 0 &&
           moved_place(self, producer_id, sequence)->producer_id != 0;
}

struct head {
    uint64_t order;
    uint32_t extent;
};

static int by_order(const void *a, const void *b) {
    uint64_t x = ((const struct head *)a)->order;
    uint64_t y = ((const struct head *)b)->order;
    return (x > y) - (x < y);
}

/* The runs of one lane that are surely linked, oldest first. Later ones follow by their links. */
static bool find_backlog(struct reader *self, uint32_t slot, struct head *heads) {
    struct segment *segment = self->segment;
    struct lane *lane = &self->lanes[slot];
    struct run run, current;
    /* SYNC: run-noted. Looked at first: the owner may fill a run and seal the one behind it while
     * this looks at the extents, and a run that is not noted yet must not hide the one before. */
    uint64_t limit =
        atomic_load_explicit(&segment->slots[slot].next_order, memory_order_acquire);
    uint64_t link =
        atomic_load_explicit(&segment->slots[slot].current, memory_order_acquire);
    bool has_current = link_is_run(segment, link, slot, &current);
    uint32_t count = 0;
    for (uint32_t i = 0; i < segment->extent_count; i++) {
        if (!extent_is_run(segment, i, slot, &run)) {
            continue;
        }
        bool sealed =
            atomic_load_explicit(&segment->extents[i].sealed, memory_order_acquire) != 0;
        if (has_current ? run.order <= current.order : sealed && run.order < limit) {
            heads[count++] = (struct head){run.order, i};
        }
        i += run.span - 1;
    }
    if (count == 0) {
        return true;
    }
    qsort(heads, count, sizeof *heads, by_order);
    lane->backlog = malloc(count * sizeof *lane->backlog);
    if (lane->backlog == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        lane->backlog[i] = heads[i].extent;
    }
    lane->backlog_count = count;
    return true;
}

static bool build_lanes(struct reader *self) {
    struct segment *segment = self->segment;
    struct head *heads = malloc(segment->extent_count * sizeof *heads);
    bool built = heads != NULL;
    for (uint32_t slot = 0; built && slot <= segment->max_producers; slot++) {
        struct lane *lane = &self->lanes[slot];
        lane->extent = NO_EXTENT;
        lane->dirty = true;
        built = find_backlog(self, slot, heads);
    }
    free(heads);
    return built;
}

bool reader_attach(struct reader *self, struct segment *segment) {
    memset(self, 0, sizeof *self);
    self->segment = segment;
    reader_replay_intents(segment);
    /* The one before is gone; this one says itself how it reads. */
    atomic_store_explicit(&segment->header->gathered, 0, memory_order_relaxed);
    self->lanes = calloc((size_t)segment->max_producers + 1, sizeof *self->lanes);
    self->runs = calloc(segment->extent_count, sizeof *self->runs);
    self->active = calloc(segment->max_producers, sizeof *self->active);
    self->parked = calloc(segment->extent_count, sizeof *self->parked);
    self->active_outdated = true;
    self->mover_run = NO_EXTENT;
    if (self->lanes == NULL || self->runs == NULL || self->active == NULL ||
        self->parked == NULL) {
        reader_detach(self);
        return false;
    }
    FAILPOINT("collector-replayed");
    writer_attach_collector(&self->mover, segment);
    /* The dead first: their last commit is counted before the count is taken as a base. */
    reader_sweep(self);
    if (!build_lanes(self)) {
        reader_detach(self);
        return false;
    }
    for (int reason = 0; reason < SHMBUS_REASONS; reason++) {
        self->released_before +=
            atomic_load_explicit(&segment->header->released[reason], memory_order_relaxed);
    }
    writer_keep_spare(&self->mover);
    return true;
}

void reader_detach(struct reader *self) {
    if (self->lanes != NULL) {
        for (uint32_t i = 0; i <= self->segment->max_producers; i++) {
            free(self->lanes[i].backlog);
            free(self->lanes[i].pending);
        }
    }
    free(self->lanes);
    free(self->runs);
    free(self->active);
    free(self->parked);
    free(self->moved);
    self->lanes = NULL;
    self->runs = NULL;
    self->active = NULL;
    self->parked = NULL;
    self->moved = NULL;
}

uint32_t reader_sweep(struct reader *self) {
    struct segment *segment = self->segment;
    uint32_t dead = 0;
    for (uint32_t i = 0; i < segment->max_producers; i++) {
        struct producer_slot *slot = &segment->slots[i];
        uint32_t state = atomic_load_explicit(&slot->state, memory_order_acquire);
        if (state == SHMBUS_SLOT_FREE ||
            segment_lock(segment->fd, SHMBUS_LOCK_SLOT + i) != LOCK_TAKEN) {
            continue;
        }
        /* The lock was free: the owner has closed, or its process has ended. */
        dead += state == SHMBUS_SLOT_ACTIVE;
        FAILPOINT("sweep-locked");
        writer_take_over(segment, i);
        segment_unlock(segment->fd, SHMBUS_LOCK_SLOT + i);
        self->lanes[i].dirty = true;
    }
    reader_tidy(self);
    return dead;
}

static bool is_unread(const struct reader *self, const struct record_place *place, uint64_t room,
                      uint64_t below, uint64_t *bytes) {
    struct record_header header;
    const struct record_header *shared =
        (const void *)(segment_extent(self->segment, place->extent) + place->offset);
    *bytes = 0;
    if (record_read_frame(shared, room, place, &header) != RECORD_OK) {
        return false;
    }
    *bytes = header.record_bytes;
    return atomic_load_explicit(&header.state, memory_order_relaxed) == SHMBUS_COMMITTED &&
           (header.lane_number < below || (header.flags & SHMBUS_FLAG_MOVED) != 0);
}

static uint64_t count_in_run(const struct reader *self, uint32_t slot, uint32_t extent,
                             uint64_t from, uint64_t below) {
    struct segment *segment = self->segment;
    struct run run;
    if (!extent_is_run(segment, extent, slot, &run)) {
        return 0;
    }
    uint64_t limit = run.span * segment->extent_bytes;
    uint64_t used = atomic_load_explicit(&segment->extents[extent].used, memory_order_acquire);
    uint64_t count = 0;
    uint64_t bytes;
    used = used > limit ? limit : used;
    for (uint64_t at = from; at < used; at += bytes) {
        struct record_place place = {extent, run.generation, at};
        count += is_unread(self, &place, used - at, below, &bytes);
        if (bytes == 0) {
            break;
        }
    }
    return count;
}

/* Follows the lane as the reader would, without taking anything. */
static uint64_t count_lane(const struct reader *self, uint32_t slot, uint64_t below) {
    struct segment *segment = self->segment;
    const struct lane *lane = &self->lanes[slot];
    uint64_t count = 0;
    uint64_t bytes;
    for (uint32_t i = 0; i < lane->pending_count; i++) {
        if (i >= lane->pending_kept && i < lane->pending_at) {
            continue;
        }
        const struct pending *entry = &lane->pending[i];
        struct record_place place = {entry->extent, entry->generation, entry->offset};
        count += is_unread(self, &place, segment->record_limit, below, &bytes);
    }
    uint64_t link = 0;
    uint64_t order = lane->last_order;
    bool any = lane->any_order;
    if (lane->extent != NO_EXTENT) {
        if (!lane->cut) {
            count += count_in_run(self, slot, lane->extent, lane->cursor, below);
        }
        link = atomic_load_explicit(&segment->extents[lane->extent].next, memory_order_acquire);
    }
    for (uint32_t i = lane->backlog_at; i < lane->backlog_count; i++) {
        uint32_t extent = lane->backlog[i];
        count += count_in_run(self, slot, extent, 0, below);
        struct run run;
        if (extent_is_run(segment, extent, slot, &run)) {
            order = run.order;
            any = true;
        }
        link = atomic_load_explicit(&segment->extents[extent].next, memory_order_acquire);
    }
    for (bool first = false;;) {
        struct run run;
        if (!link_is_run(segment, link, slot, &run) || (any && run.order <= order)) {
            if (first) {
                return count;
            }
            first = true;
            link = atomic_load_explicit(&segment->slots[slot].first, memory_order_acquire);
            continue;
        }
        any = true;
        order = run.order;
        count += count_in_run(self, slot, link_low(link) - 1, 0, below);
        link = atomic_load_explicit(&segment->extents[link_low(link) - 1].next,
                                    memory_order_acquire);
    }
}

uint64_t reader_count_unread(struct reader *self, uint64_t *committed) {
    uint64_t unread = 0;
    *committed = 0;
    for (uint32_t slot = 0; slot <= self->segment->max_producers; slot++) {
        uint64_t below =
            atomic_load_explicit(&self->segment->slots[slot].committed, memory_order_acquire);
        bool own = slot == self->segment->max_producers;
        if (own && !self->lanes[slot].dirty && !self->lanes[slot].visiting) {
            continue;
        }
        *committed += own ? 0 : below;
        unread += count_lane(self, slot, below);
    }
    return unread;
}
