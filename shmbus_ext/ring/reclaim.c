/* Freeing runs, and moving the records that keep them (see reader.h). */
#include "reader.h"

#include "base/failpoints.h"
#include "base/file_lock.h"
#include "intent_log.h"

/* Share of the bus in ended runs that triggers a tidy. */
#define NOTABLE_SHARE 32u
/* Share of freed space that triggers a wake of waiting producers; otherwise an idle reader wakes
 * them. To wake a process on an idle processor of a virtual machine takes the reader 35 us, the
 * time to pack ten records. A producer without a wake looks again within 0.1 s. */
#define WORTH_WAKING_SHARE 8u

bool lane_enter_run(struct reader *self, struct lane *lane, uint64_t link) {
    struct run run;
    if (!link_is_run(self->segment, link, lane->slot, &run) ||
        (lane->any_order && run.order <= lane->last_order)) {
        return false;
    }
    uint32_t extent = link_low(link) - 1;
    struct run_state *state = &self->runs[extent];
    if (state->phase != RUN_UNKNOWN) {
        return false;
    }
    *state = (struct run_state){
        .generation = run.generation, .span = run.span, .slot = lane->slot, .phase = RUN_WALKING};
    lane->extent = extent;
    lane->cursor = lane->limit = 0;
    lane->cut = false;
    lane->any_order = true;
    lane->last_order = run.order;
    return true;
}

static uint32_t share(const struct reader *self, uint32_t parts) {
    return (self->segment->extent_count + parts - 1) / parts;
}

static void free_run(struct reader *self, uint32_t extent) {
    struct segment *segment = self->segment;
    struct run_state *run = &self->runs[extent];
    uint64_t word = link_make(run->generation, run->slot + 1);
    if (run->span == 1) {
        extent_unlease(segment, extent, word);
    } else {
        intent_log_free(segment, extent, run->span, word);
    }
    self->freed_unannounced += run->span;
    memset(run, 0, sizeof *run);
    self->runs_freed++;
    writer_keep_spare(&self->mover);
    if (self->freed_unannounced >= share(self, WORTH_WAKING_SHARE)) {
        reader_announce_space(self);
    }
}

void reader_announce_space(struct reader *self) {
    if (self->freed_unannounced > 0) {
        bell_ring_for(&self->segment->header->space_bell, SPACE_FREED, self->freed_unannounced);
        self->freed_unannounced = 0;
    }
}

/* A writable view pins its run until a takeover of the producer's slot. By then the process has
 * ended, or has put private copies under its views. A process with a closed lane and a held slot
 * lock may still lack the copies. */
static bool writer_keeps(const struct reader *self, uint32_t extent) {
    const struct extent_desc *desc = &self->segment->extents[extent];
    const struct producer_slot *owner = &self->segment->slots[self->runs[extent].slot];
    return ACQUIRE(desc->writer_pins) != 0 && ACQUIRE(owner->state) != SHMBUS_SLOT_FREE &&
           ACQUIRE(owner->producer_id) == RELAXED(desc->producer_id);
}

static bool is_over(const struct run_state *run) {
    return run->phase == RUN_WALKED && run->live == 0 && run->open == 0;
}

static bool is_lent(const struct reader *self) {
    return RELAXED(self->segment->header->lent) != 0;
}

/* Queues a run for reader_tidy, which frees the run once no view keeps it. */
static void park(struct reader *self, uint32_t extent) {
    if (!self->runs[extent].parked) {
        self->runs[extent].parked = true;
        self->parked[self->parked_count++] = extent;
        self->parked_new += self->runs[extent].span;
    }
}

/* An owner stopped or dead between link and note must not keep a note of a freed run: the linked
 * run would be lost. */
static void note_successor(struct reader *self, uint32_t extent, uint64_t next) {
    const struct run_state *run = &self->runs[extent];
    _Atomic uint64_t *current = &self->segment->slots[run->slot].current;
    uint64_t own = link_make(run->generation, extent + 1);
    /* SYNC: run-noted. */
    if (RELAXED(*current) == own) {
        EXCHANGE(*current, own, next, memory_order_release);
    }
}

static void unlink_and_free(struct reader *self, uint32_t extent) {
    const struct run_state *run = &self->runs[extent];
    /* SYNC: run-linked. From here on its owner cannot link to the run: the link exists already, or
     * the owner begins a new chain. */
    uint64_t next = link_make(run->generation, 0);
    bool ended = atomic_compare_exchange_strong_explicit(
        &self->segment->extents[extent].next, &next, link_make(run->generation, SHMBUS_LINK_END),
        memory_order_acq_rel, memory_order_acquire);
    FAILPOINT("free-ended");
    if (!ended) {
        note_successor(self, extent, next);
    }
    struct lane *lane = &self->lanes[run->slot];
    if (lane->extent == extent) {
        lane->extent = NO_EXTENT;
        if (!ended) {
            lane_enter_run(self, lane, next);
        }
        lane->dirty = true;
    }
    free_run(self, extent);
}

void reader_try_free(struct reader *self, uint32_t extent) {
    if (!is_over(&self->runs[extent])) {
        return;
    }
    /* On a bus without borrowers, only this process and the run's producer can hold views of the
     * run. */
    if (is_lent(self) || writer_keeps(self, extent)) {
        park(self, extent);
    } else if (!self->runs[extent].parked) {
        unlink_and_free(self, extent);
    }
}

/* The first of the sorted parked[from..to) not below a lock's byte. */
static uint32_t parked_at(const struct reader *self, uint32_t from, uint32_t to, int64_t byte) {
    while (from < to) {
        uint32_t middle = from + (to - from) / 2;
        if (SHMBUS_LOCK_VIEW + (int64_t)self->parked[middle] < byte) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return from;
}

/* Marks the runs of parked[from..to) without a borrower's view lock; view locks are older than the
 * parking. */
static void find_unviewed(struct reader *self, uint32_t from, uint32_t to) {
    while (from < to) {
        int64_t start = SHMBUS_LOCK_VIEW + (int64_t)self->parked[from];
        int64_t bytes = (int64_t)self->parked[to - 1] - (int64_t)self->parked[from] + 1;
        enum lock_status found = file_lock_find(self->segment->fd, &start, &bytes);
        if (found == LOCK_TAKEN) {
            for (uint32_t i = from; i < to; i++) {
                self->runs[self->parked[i]].unviewed = true;
            }
        }
        if (found != LOCK_HELD_ELSEWHERE) {
            return;
        }
        uint32_t before = parked_at(self, from, to, start);
        uint32_t behind = bytes == 0 ? to : parked_at(self, before, to, start + bytes);
        /* Recursion into the shorter side stays shallow. */
        if (before - from < to - behind) {
            find_unviewed(self, from, before);
            from = behind;
        } else {
            find_unviewed(self, behind, to);
            to = before;
        }
    }
}

void reader_tidy(struct reader *self) {
    uint32_t count = self->parked_count;
    self->parked_new = 0;
    if (count == 0) {
        return;
    }
    bool lent = is_lent(self);
    for (uint32_t i = 0; i < count; i++) {
        self->runs[self->parked[i]].unviewed = !lent;
    }
    if (lent) {
        extents_sort(self->parked, count);
        find_unviewed(self, 0, count);
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t extent = self->parked[i];
        if (!self->runs[extent].unviewed || writer_keeps(self, extent)) {
            self->parked[kept++] = extent;
        } else {
            unlink_and_free(self, extent);
        }
    }
    self->parked_count = kept;
}

void reader_tidy_in_a_pause(struct reader *self) {
    /* With scarce space, runs kept by a view deserve another check. */
    uint32_t wanted = RELAXED(self->segment->header->space_bell.wanted);
    if (self->parked_new > 0 || (wanted & SPACE_FREED) != 0) {
        reader_tidy(self);
    }
}

void reader_hold(struct reader *self, const struct record_ref *ref) {
    struct run_state *run = &self->runs[ref->place.extent];
    run->live++;
    run->live_bytes += ref->bytes;
}

void reader_let_go(struct reader *self, const struct record_ref *ref) {
    struct run_state *run = &self->runs[ref->place.extent];
    run->live--;
    run->live_bytes -= ref->bytes;
    if (run->live == 0) {
        reader_try_free(self, ref->place.extent);
        if (self->parked_new >= share(self, NOTABLE_SHARE)) {
            reader_tidy(self);
        }
    }
}

bool reader_run_is_sparse(const struct reader *self, uint32_t extent) {
    const struct run_state *run = &self->runs[extent];
    return run->phase == RUN_WALKED && run->live > 0 && run->open == 0 &&
           extent != self->mover_run &&
           run->live_bytes <= run->span * self->segment->extent_bytes / 2;
}

/* The mover's new run belongs to the reader: no cursor walks it, and it is freed like every run. */
static void adopt_mover_run(struct reader *self) {
    uint32_t before = self->mover_run;
    self->mover_run = self->mover.extent;
    self->runs[self->mover.extent] = (struct run_state){.generation = self->mover.generation,
                                                        .span = 1,
                                                        .slot = self->mover.slot_index,
                                                        .phase = RUN_WALKING};
    if (before != NO_EXTENT) {
        self->runs[before].phase = RUN_WALKED;
        reader_try_free(self, before);
    }
}

bool reader_move(struct reader *self, struct record_ref *ref) {
    struct segment *segment = self->segment;
    struct writer *mover = &self->mover;
    struct reservation to;
    const struct lane *own = &self->lanes[mover->slot_index];
    if (own->dirty || own->visiting) {
        /* Read the moves of an earlier collector first. */
        return false;
    }
    if (ref->bytes > segment->extent_bytes ||
        writer_claim(mover, ref->bytes, &to) != WRITER_OK) {
        return false;
    }
    if (mover->extent != self->mover_run) {
        adopt_mover_run(self);
    }
    struct record_header *from = record_of(segment, &ref->place);
    record_copy_image(to.record, &to.place, from, ref->bytes, from->producer_id,
                      mover->slot_index, from->flags | SHMBUS_FLAG_MOVED);
    intent_log_begin_move(segment, &ref->place, &to.place);
    /* Keep the leased state of a partial group. */
    writer_publish_moved(mover, &to, RELAXED(from->state));
    FAILPOINT("move-published");
    /* SYNC: record-moved. After the exposure of the second copy: a reader always finds a copy. */
    SET_RELEASE(from->state, SHMBUS_RELEASED);
    FAILPOINT("move-ended");
    intent_log_end_move(segment);
    struct record_ref old = *ref;
    ref->place = to.place;
    reader_hold(self, ref);
    reader_let_go(self, &old);
    self->moves++;
    return true;
}
