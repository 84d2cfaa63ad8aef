/* What the collector gives back: releases of records, runs, and stragglers moved out of the way. */
#include <string.h>

#include "checksum.h"
#include "doorbell.h"
#include "failpoints.h"
#include "reader.h"

/* What has ended is looked at, and producers that wait are woken, when it is this part of the bus. */
#define NOTABLE_SHARE 32u

static struct record_header *record_of(const struct segment *segment,
                                       const struct record_place *place) {
    return (struct record_header *)(void *)(segment_extent(segment, place->extent) + place->offset);
}

static uint64_t pack_ref(const struct record_place *place) {
    return ((uint64_t)place->extent << REF_OFFSET_BITS) | (place->offset / SHMBUS_RECORD_ALIGN);
}

static bool unpack_ref(const struct segment *segment, uint64_t ref, struct record_place *place) {
    place->extent = (uint32_t)(ref >> REF_OFFSET_BITS);
    place->generation = 0;
    place->offset = (ref & ((UINT64_C(1) << REF_OFFSET_BITS) - 1)) * SHMBUS_RECORD_ALIGN;
    return place->extent < segment->extent_count &&
           place->offset < (segment->extent_count - place->extent) * segment->extent_bytes;
}

static uint32_t intent_crc(const struct segment *segment, uint32_t n, uint32_t reason,
                           uint64_t base) {
    uint64_t about[2] = {((uint64_t)n << 32) | reason, base};
    uint32_t crc = shmbus_crc32c(0, about, sizeof about);
    return shmbus_crc32c(crc, (const void *)segment->intent_log, (size_t)n * 8);
}

void reader_release(struct reader *self, const struct record_ref *const *refs, uint32_t n,
                    enum shmbus_reason reason) {
    struct segment *segment = self->segment;
    struct bus_header *header = segment->header;
    _Atomic uint64_t *counter = &header->released[reason];
    uint64_t base = atomic_load_explicit(counter, memory_order_relaxed);
    for (uint32_t i = 0; i < n; i++) {
        atomic_store_explicit(&segment->intent_log[i], pack_ref(&refs[i]->place),
                              memory_order_relaxed);
    }
    header->intent_reason = (uint32_t)reason;
    header->intent_base = base;
    header->intent_crc = intent_crc(segment, n, (uint32_t)reason, base);
    FAILPOINT("release-logged");
    /* SYNC: release-intended. From here on all of them are released, whoever finishes it. */
    atomic_store_explicit(&header->intent_count, n, memory_order_release);
    FAILPOINT("release-intended");
    for (uint32_t i = 0; i < n; i++) {
        atomic_store_explicit(&record_of(segment, &refs[i]->place)->state, SHMBUS_RELEASED,
                              memory_order_relaxed);
        FAILPOINT("release-half");
    }
    atomic_store_explicit(counter, base + n, memory_order_relaxed);
    FAILPOINT("release-counted");
    atomic_store_explicit(&header->intent_count, 0, memory_order_release);
}

static void replay_release(struct segment *segment) {
    struct bus_header *header = segment->header;
    /* SYNC: release-intended. */
    uint32_t n = atomic_load_explicit(&header->intent_count, memory_order_acquire);
    uint32_t reason = header->intent_reason;
    uint64_t base = header->intent_base;
    if (n == 0 || n > SHMBUS_MAX_GROUP_SIZE || reason >= SHMBUS_REASONS ||
        header->intent_crc != intent_crc(segment, n, reason, base)) {
        atomic_store_explicit(&header->intent_count, 0, memory_order_release);
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint64_t ref = atomic_load_explicit(&segment->intent_log[i], memory_order_relaxed);
        struct record_place place;
        if (!unpack_ref(segment, ref, &place)) {
            continue;
        }
        uint32_t committed = SHMBUS_COMMITTED;
        atomic_compare_exchange_strong_explicit(&record_of(segment, &place)->state, &committed,
                                                SHMBUS_RELEASED, memory_order_relaxed,
                                                memory_order_relaxed);
    }
    atomic_store_explicit(&header->released[reason], base + n, memory_order_relaxed);
    atomic_store_explicit(&header->intent_count, 0, memory_order_release);
}

/* Frees a run of several extents so that a death half way leaves none behind: the words that it is
 * freed from are in the log, and freeing from an exact word succeeds once only. */
static void free_words(struct segment *segment, uint32_t first, uint32_t span) {
    for (uint32_t i = span; i-- > 0;) {
        extent_unlease(segment, first + i,
                       atomic_load_explicit(&segment->intent_log[i], memory_order_relaxed));
        FAILPOINT("free-half");
    }
    atomic_store_explicit(&segment->header->free_span, 0, memory_order_release);
}

static void replay_free(struct segment *segment) {
    struct bus_header *header = segment->header;
    uint32_t span = atomic_load_explicit(&header->free_span, memory_order_acquire);
    uint32_t first = header->free_first;
    if (span > SHMBUS_MAX_GROUP_SIZE || span > segment->extent_count ||
        first > segment->extent_count - span) {
        span = 0;
    }
    free_words(segment, first, span);
}

/* A mover that died left one copy, or two: of two the first one ends here, before anybody is given
 * the other, which may be acknowledged and gone when the first is come across. */
static void replay_move(struct segment *segment) {
    struct bus_header *header = segment->header;
    struct record_place from, to;
    /* SYNC: move-intended. */
    uint64_t ref = atomic_load_explicit(&header->move_from, memory_order_acquire);
    if (ref != 0 && unpack_ref(segment, ref - 1, &from) &&
        unpack_ref(segment, header->move_to, &to)) {
        const struct extent_desc *desc = &segment->extents[to.extent];
        uint64_t word = atomic_load_explicit(&desc->word, memory_order_acquire);
        if (link_generation(word) == header->move_generation &&
            to.offset < atomic_load_explicit(&desc->used, memory_order_acquire)) {
            uint32_t committed = SHMBUS_COMMITTED;
            atomic_compare_exchange_strong_explicit(&record_of(segment, &from)->state, &committed,
                                                    SHMBUS_RELEASED, memory_order_relaxed,
                                                    memory_order_relaxed);
        }
    }
    atomic_store_explicit(&header->move_from, 0, memory_order_release);
}

void reader_replay_intents(struct segment *segment) {
    replay_release(segment);
    replay_free(segment);
    replay_move(segment);
}

static uint32_t notable(const struct reader *self) {
    return (self->segment->extent_count + NOTABLE_SHARE - 1) / NOTABLE_SHARE;
}

static void free_run(struct reader *self, uint32_t extent) {
    struct segment *segment = self->segment;
    struct run_state *run = &self->runs[extent];
    uint64_t word = link_make(run->generation, run->slot + 1);
    if (run->span == 1) {
        extent_unlease(segment, extent, word);
    } else {
        atomic_store_explicit(&segment->intent_log[0], word, memory_order_relaxed);
        for (uint32_t i = 1; i < run->span; i++) {
            uint64_t tail =
                atomic_load_explicit(&segment->extents[extent + i].word, memory_order_relaxed);
            /* A tail that is not this slot's is none of ours: its word cannot match 0. */
            tail = link_low(tail) == run->slot + 1 ? tail : 0;
            atomic_store_explicit(&segment->intent_log[i], tail, memory_order_relaxed);
        }
        segment->header->free_first = extent;
        atomic_store_explicit(&segment->header->free_span, run->span, memory_order_release);
        free_words(segment, extent, run->span);
    }
    self->freed_unannounced += run->span;
    memset(run, 0, sizeof *run);
    self->runs_freed++;
    writer_keep_spare(&self->mover);
    if (self->freed_unannounced >= notable(self)) {
        reader_announce_space(self);
    }
}

void reader_announce_space(struct reader *self) {
    if (self->freed_unannounced > 0) {
        doorbell_space_freed(self->segment->header, self->freed_unannounced);
        self->freed_unannounced = 0;
    }
}

/* A writable view pins its run until its producer's slot has been taken over: then the process has
 * ended, or has put private copies under its views. One that has closed its lane, and still holds
 * the slot's lock, may not have done so yet. */
static bool writer_keeps(const struct reader *self, uint32_t extent) {
    const struct extent_desc *desc = &self->segment->extents[extent];
    const struct producer_slot *owner = &self->segment->slots[self->runs[extent].slot];
    return atomic_load_explicit(&desc->writer_pins, memory_order_acquire) != 0 &&
           atomic_load_explicit(&owner->state, memory_order_acquire) != SHMBUS_SLOT_FREE &&
           atomic_load_explicit(&owner->producer_id, memory_order_acquire) ==
               atomic_load_explicit(&desc->producer_id, memory_order_relaxed);
}

static bool is_over(const struct run_state *run) {
    return run->phase == RUN_WALKED && run->live == 0 && run->open == 0;
}

static bool is_lent(const struct reader *self) {
    return atomic_load_explicit(&self->segment->header->lent, memory_order_relaxed) != 0;
}

static void park(struct reader *self, uint32_t extent) {
    if (!self->runs[extent].parked) {
        self->runs[extent].parked = true;
        self->parked[self->parked_count++] = extent;
        self->parked_new += self->runs[extent].span;
    }
}

/* An owner that has linked a run and not noted it yet, stopped there or dead, must not be left with
 * a note of a run that is freed: nobody could find the linked one any more. */
static void note_successor(struct reader *self, uint32_t extent, uint64_t next) {
    const struct run_state *run = &self->runs[extent];
    _Atomic uint64_t *current = &self->segment->slots[run->slot].current;
    uint64_t own = link_make(run->generation, extent + 1);
    /* SYNC: run-noted. */
    if (atomic_load_explicit(current, memory_order_relaxed) == own) {
        atomic_compare_exchange_strong_explicit(current, &own, next, memory_order_release,
                                                memory_order_relaxed);
    }
}

static void unlink_and_free(struct reader *self, uint32_t extent) {
    const struct run_state *run = &self->runs[extent];
    /* SYNC: run-linked. After this its owner cannot link to it: it has, or it will begin anew. */
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
            reader_enter_run(self, lane, next);
        }
        lane->dirty = true;
    }
    free_run(self, extent);
}

void reader_try_free(struct reader *self, uint32_t extent) {
    if (!is_over(&self->runs[extent])) {
        return;
    }
    /* On a bus that never lent nobody but its producer can have a view that this process has not. */
    if (is_lent(self) || writer_keeps(self, extent)) {
        park(self, extent);
    } else if (!self->runs[extent].parked) {
        unlink_and_free(self, extent);
    }
}

/* The first of parked[from..to), which is in order, that is not below a lock's byte. */
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

/* Marks those of parked[from..to) that no borrower looks at. A borrower's views say so by a lock,
 * whoever leased it the group: it is taken while the record is still leased, so before its run was
 * parked. One question is enough for any number of runs, and two more for each lock between them. */
static void find_unviewed(struct reader *self, uint32_t from, uint32_t to) {
    while (from < to) {
        int64_t start = SHMBUS_LOCK_VIEW + (int64_t)self->parked[from];
        int64_t bytes = (int64_t)self->parked[to - 1] - (int64_t)self->parked[from] + 1;
        enum lock_status found = segment_lock_find(self->segment->fd, &start, &bytes);
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
        /* The shorter side by recursion, so that it is never deep. */
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
    /* Where space is short, what a view kept a moment ago is worth another look. */
    if (self->parked_new > 0 || atomic_load_explicit(&self->segment->header->space_wanted,
                                                     memory_order_relaxed) != 0) {
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
        if (self->parked_new >= notable(self)) {
            reader_tidy(self);
        }
    }
}

/* The mover's new run is the reader's own: nobody walks it, it is freed like any other. */
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
        /* What an earlier collector moved must be read first. */
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
    memcpy((uint8_t *)to.record + 8, (const uint8_t *)from + 8, ref->bytes - 8);
    record_write_frame(to.record, &to.place, ref->bytes, to.record->producer_id,
                       mover->slot_index, to.record->flags | SHMBUS_FLAG_MOVED);
    segment->header->move_to = pack_ref(&to.place);
    segment->header->move_generation = to.place.generation;
    /* SYNC: move-intended. From the publication on it is the other copy that counts. */
    atomic_store_explicit(&segment->header->move_from, pack_ref(&ref->place) + 1,
                          memory_order_release);
    FAILPOINT("move-intended");
    writer_publish_moved(mover, &to);
    FAILPOINT("move-published");
    /* SYNC: record-moved. */
    atomic_store_explicit(&from->state, SHMBUS_RELEASED, memory_order_release);
    FAILPOINT("move-ended");
    atomic_store_explicit(&segment->header->move_from, 0, memory_order_release);
    struct record_ref old = *ref;
    ref->place = to.place;
    reader_hold(self, ref);
    reader_let_go(self, &old);
    self->moves++;
    return true;
}
