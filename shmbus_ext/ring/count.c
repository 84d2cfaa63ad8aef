/* Counting unread records: the walk of reader.c without changes to shared state. */
#include "reader.h"

static bool is_unread(const struct reader *self, const struct record_place *place, uint64_t room,
                      uint64_t below, uint64_t *bytes) {
    struct record_header header;
    *bytes = 0;
    if (record_read_frame(record_of(self->segment, place), room, place, &header) != RECORD_OK) {
        return false;
    }
    *bytes = header.record_bytes;
    return shmbus_is_committed(RELAXED(header.state)) &&
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
    uint64_t used = ACQUIRE(segment->extents[extent].used);
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
        link = ACQUIRE(segment->extents[lane->extent].next);
    }
    for (uint32_t i = lane->backlog_at; i < lane->backlog_count; i++) {
        uint32_t extent = lane->backlog[i];
        count += count_in_run(self, slot, extent, 0, below);
        struct run run;
        if (extent_is_run(segment, extent, slot, &run)) {
            order = run.order;
            any = true;
        }
        link = ACQUIRE(segment->extents[extent].next);
    }
    for (bool first = false;;) {
        struct run run;
        if (!link_is_run(segment, link, slot, &run) || (any && run.order <= order)) {
            if (first) {
                return count;
            }
            first = true;
            link = ACQUIRE(segment->slots[slot].first);
            continue;
        }
        any = true;
        order = run.order;
        count += count_in_run(self, slot, link_low(link) - 1, 0, below);
        link = ACQUIRE(segment->extents[link_low(link) - 1].next);
    }
}

uint64_t reader_count_unread(struct reader *self, uint64_t *committed) {
    uint64_t unread = 0;
    *committed = 0;
    for (uint32_t slot = 0; slot <= self->segment->max_producers; slot++) {
        uint64_t below = ACQUIRE(self->segment->slots[slot].committed);
        bool own = slot == self->segment->max_producers;
        if (own && !self->lanes[slot].dirty && !self->lanes[slot].visiting) {
            continue;
        }
        *committed += own ? 0 : below;
        unread += count_lane(self, slot, below);
    }
    return unread;
}
