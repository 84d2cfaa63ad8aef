/* How a collector begins (see reader.h). */
#include "reader.h"

#include <stdlib.h>

#include "base/failpoints.h"
#include "intent_log.h"

struct head {
    uint64_t order;
    uint32_t extent;
};

static int by_order(const void *a, const void *b) {
    uint64_t x = ((const struct head *)a)->order;
    uint64_t y = ((const struct head *)b)->order;
    return (x > y) - (x < y);
}

/* Finds the certainly linked runs of a lane, oldest first. Their links lead to later runs. */
static bool find_backlog(struct reader *self, uint32_t slot, struct head *heads) {
    struct segment *segment = self->segment;
    struct lane *lane = &self->lanes[slot];
    struct run run, current;
    /* SYNC: run-noted. Read before the scan: meanwhile the owner may fill and seal further runs,
     * and a run not noted yet must not hide its predecessor. */
    uint64_t limit = ACQUIRE(segment->slots[slot].next_order);
    uint64_t link = ACQUIRE(segment->slots[slot].current);
    bool has_current = link_is_run(segment, link, slot, &current);
    uint32_t count = 0;
    for (uint32_t i = 0; i < segment->extent_count; i++) {
        if (!extent_is_run(segment, i, slot, &run)) {
            continue;
        }
        bool sealed = ACQUIRE(segment->extents[i].sealed) != 0;
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
        lane->slot = slot;
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
    intent_log_replay(segment);
    /* Reset the last consumer's word; a consumer that packs stores 1 again. */
    SET_RELAXED(segment->header->consumer_packs, 0);
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
    /* Dead producers first: their last commits count. */
    reader_sweep(self, RECOVERY_WHOLE);
    if (!build_lanes(self)) {
        reader_detach(self);
        return false;
    }
    for (int reason = 0; reason < SHMBUS_REASONS; reason++) {
        self->released_before += RELAXED(segment->header->released[reason]);
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
    moved_set_clear(&self->moved);
    self->lanes = NULL;
    self->runs = NULL;
    self->active = NULL;
    self->parked = NULL;
}

uint32_t reader_sweep(struct reader *self, uint32_t most) {
    struct segment *segment = self->segment;
    request_heal(segment);
    /* Each recovery advances the attach epoch, which triggers the next visit of the lane. */
    uint32_t dead = recover_dead(segment, NO_SLOT, most);
    reader_tidy(self);
    return dead;
}
