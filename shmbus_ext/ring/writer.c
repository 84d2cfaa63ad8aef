/* The producer's side of a lane (see writer.h; LAYOUT.md has the ordering argument). */
#define _GNU_SOURCE
#include "writer.h"

#include <string.h>
#include <unistd.h>

#include "doorbell.h"
#include "failpoints.h"

/* Slots are tried this often, since a reader that recovers a slot holds its lock for a moment. */
#define ATTACH_PASSES 4
/* Or for longer, where it is not run: then it is worth waiting. */
#define SLOT_PATIENCE_NS UINT64_C(500000000)
#define SLOT_POLL_US 1000
/* A writer looks back for the reader at the end of a run, and no sooner than after this: a reader at
 * work on another processor looks less often than a run of a few records is filled. */
#define LOOK_BACK_NS UINT64_C(100000)

static void set_label(struct producer_slot *slot, const char *label) {
    size_t length = strlen(label);
    if (length >= SHMBUS_LABEL_BYTES) {
        length = SHMBUS_LABEL_BYTES - 1;
    }
    memset(slot->label, 0, SHMBUS_LABEL_BYTES);
    memcpy(slot->label, label, length);
}

static void begin(struct writer *self, struct segment *segment, uint32_t slot_index) {
    memset(self, 0, sizeof *self);
    self->segment = segment;
    self->slot_index = slot_index;
    self->slot = &segment->slots[slot_index];
    self->extent = NO_EXTENT;
    self->spare = NO_EXTENT;
    self->committed = atomic_load_explicit(&self->slot->committed, memory_order_relaxed);
    self->aborted = atomic_load_explicit(&self->slot->aborted, memory_order_relaxed);
    self->last_link = atomic_load_explicit(&self->slot->current, memory_order_relaxed);
    self->producer_id = atomic_fetch_add_explicit(&segment->header->next_producer_id, 1,
                                                  memory_order_relaxed);
}

static void announce(struct writer *self) {
    /* SYNC: slot-taken. A reader that sees this id knows that the one before it is dead. */
    atomic_store_explicit(&self->slot->producer_id, self->producer_id, memory_order_release);
    FAILPOINT("attach-named");
    atomic_store_explicit(&self->slot->state, SHMBUS_SLOT_ACTIVE, memory_order_release);
    atomic_fetch_add_explicit(&self->segment->header->attach_epoch, 1, memory_order_release);
}

enum writer_status writer_attach(struct writer *self, struct segment *segment, const char *label) {
    for (int pass = 0; pass < ATTACH_PASSES; pass++) {
        for (uint32_t i = 0; i < segment->max_producers; i++) {
            struct producer_slot *slot = &segment->slots[i];
            uint32_t state = atomic_load_explicit(&slot->state, memory_order_acquire);
            if (pass == 0 && state != SHMBUS_SLOT_FREE) {
                continue;
            }
            enum lock_status lock = segment_lock(segment->fd, SHMBUS_LOCK_SLOT + i);
            if (lock == LOCK_ERROR) {
                return WRITER_SYSTEM_ERROR;
            }
            if (lock == LOCK_HELD_ELSEWHERE) {
                continue;
            }
            FAILPOINT("attach-locked");
            writer_take_over(segment, i);
            FAILPOINT("attach-taken-over");
            begin(self, segment, i);
            set_label(slot, label);
            atomic_store_explicit(&slot->pid, (uint32_t)getpid(), memory_order_relaxed);
            announce(self);
            return WRITER_OK;
        }
    }
    return WRITER_NO_SLOT;
}

/* Whether a slot that nobody is active in was not to be had all the same. */
static bool slot_in_passing(const struct segment *segment) {
    for (uint32_t i = 0; i < segment->max_producers; i++) {
        if (atomic_load_explicit(&segment->slots[i].state, memory_order_acquire) !=
            SHMBUS_SLOT_ACTIVE) {
            return true;
        }
    }
    return false;
}

enum writer_status writer_attach_in_time(struct writer *self, struct segment *segment,
                                         const char *label) {
    uint64_t began_ns = clock_monotonic_ns();
    enum writer_status status;
    while ((status = writer_attach(self, segment, label)) == WRITER_NO_SLOT &&
           slot_in_passing(segment) && clock_monotonic_ns() - began_ns < SLOT_PATIENCE_NS) {
        usleep(SLOT_POLL_US);
    }
    return status;
}

void writer_close(struct writer *self) {
    writer_seal(self);
    FAILPOINT("close-sealed");
    atomic_store_explicit(&self->slot->state, SHMBUS_SLOT_CLOSED, memory_order_release);
    atomic_fetch_add_explicit(&self->segment->header->attach_epoch, 1, memory_order_release);
    doorbell_ring(self->segment->header);
}

void writer_seal(struct writer *self) {
    if (self->extent == NO_EXTENT) {
        return;
    }
    /* SYNC: run-sealed. `used` is final. */
    atomic_store_explicit(&self->segment->extents[self->extent].sealed, 1, memory_order_release);
    self->extent = NO_EXTENT;
}

/* Behind the lane's last run, or, where the reader has ended that chain, as a new first one. */
static void link_run(struct writer *self, uint64_t link) {
    bool linked = false;
    if (link_low(self->last_link) != 0 &&
        link_low(self->last_link) <= self->segment->extent_count) {
        uint32_t last = link_low(self->last_link) - 1;
        uint64_t expected = link_make(link_generation(self->last_link), 0);
        /* SYNC: run-linked. */
        linked = atomic_compare_exchange_strong_explicit(&self->segment->extents[last].next,
                                                         &expected, link, memory_order_release,
                                                         memory_order_relaxed);
    }
    if (!linked) {
        atomic_store_explicit(&self->slot->first, link, memory_order_release);
    }
    FAILPOINT("run-linked");
    /* SYNC: run-noted. */
    atomic_store_explicit(&self->slot->current, link, memory_order_release);
    self->last_link = link;
}

/* Whether the reader, where there is one, has looked at the bus since this was last asked. */
static void look_back(struct writer *self) {
    const struct bus_header *header = self->segment->header;
    uint64_t now_ns = clock_monotonic_ns();
    if (now_ns - self->looked_back_ns < LOOK_BACK_NS) {
        return;
    }
    uint64_t seen_ns = atomic_load_explicit(&header->collector_seen_ns, memory_order_relaxed);
    self->ahead = seen_ns < self->looked_back_ns &&
                  atomic_load_explicit(&header->collector_pid, memory_order_relaxed) != 0;
    self->looked_back_ns = now_ns;
}

static enum writer_status next_run(struct writer *self, uint64_t bytes) {
    struct segment *segment = self->segment;
    uint32_t span = (uint32_t)((bytes + segment->extent_bytes - 1) / segment->extent_bytes);
    uint32_t generation;
    uint32_t extent = extent_lease(segment, self->slot_index, span, &generation);
    if (extent == NO_EXTENT && span == 1 && self->spare != NO_EXTENT) {
        extent = self->spare;
        generation = self->spare_generation;
        self->spare = NO_EXTENT;
    }
    if (extent == NO_EXTENT) {
        return WRITER_FULL;
    }
    FAILPOINT("run-leased");
    look_back(self);
    writer_seal(self);
    /* SYNC: run-noted. Whoever sees this order has the note of the run before it. */
    uint64_t order =
        atomic_fetch_add_explicit(&self->slot->next_order, 1, memory_order_release);
    extent_enter(segment, extent, generation, span, order, self->producer_id);
    FAILPOINT("run-entered");
    link_run(self, link_make(generation, extent + 1));
    self->extent = extent;
    self->generation = generation;
    self->used = 0;
    self->run_bytes = span * segment->extent_bytes;
    return WRITER_OK;
}

enum writer_status writer_claim(struct writer *self, uint64_t bytes, struct reservation *out) {
    if (bytes > self->segment->record_limit) {
        return WRITER_TOO_LARGE;
    }
    if (self->extent == NO_EXTENT || bytes > self->run_bytes - self->used) {
        enum writer_status status = next_run(self, bytes);
        if (status != WRITER_OK) {
            return status;
        }
    }
    out->bytes = bytes;
    out->place.extent = self->extent;
    out->place.generation = self->generation;
    out->place.offset = self->used;
    out->record = (struct record_header *)(void *)(segment_extent(self->segment, self->extent) +
                                                   self->used);
    return WRITER_OK;
}

/* Until `committed` has grown, an heir decides by this intent whether the commit happened. */
static void intend_commit(struct writer *self, const struct reservation *at) {
    uint64_t reference = ((uint64_t)at->place.extent << 40) | (at->place.offset / SHMBUS_RECORD_ALIGN);
    atomic_store_explicit(&self->slot->commit_ref, reference, memory_order_relaxed);
    atomic_store_explicit(&self->slot->commit_generation, at->place.generation,
                          memory_order_relaxed);
    /* SYNC: commit-intended. */
    atomic_store_explicit(&self->slot->committing, self->committed + 1, memory_order_release);
    FAILPOINT("commit-intended");
    record_close(at->record, self->sequence, self->committed);
}

static void count_commit(struct writer *self) {
    FAILPOINT("commit-marked");
    self->sequence++;
    self->committed++;
    /* SYNC: lane-advanced. A reader that sees the count sees the record. */
    atomic_store_explicit(&self->slot->committed, self->committed, memory_order_release);
}

static void make_visible(struct writer *self, const struct reservation *at) {
    self->used = at->place.offset + at->bytes;
    /* SYNC: record-exposed. The frame is in place. */
    atomic_store_explicit(&self->segment->extents[at->place.extent].used, self->used,
                          memory_order_release);
    FAILPOINT("record-exposed");
}

void writer_publish(struct writer *self, const struct reservation *at) {
    intend_commit(self, at);
    /* SYNC: record-published. */
    atomic_store_explicit(&at->record->state, SHMBUS_COMMITTED, memory_order_release);
    FAILPOINT("record-published");
    make_visible(self, at);
    count_commit(self);
}

void writer_publish_moved(struct writer *self, const struct reservation *at) {
    record_reseal(at->record);
    atomic_store_explicit(&at->record->state, SHMBUS_COMMITTED, memory_order_release);
    make_visible(self, at);
}

void writer_keep_spare(struct writer *self) {
    if (self->spare == NO_EXTENT && segment_reserved(self->segment) > 0) {
        self->spare =
            extent_lease(self->segment, self->slot_index, 1, &self->spare_generation);
    }
}

void writer_reserve(struct writer *self, const struct reservation *at) {
    atomic_store_explicit(&at->record->state, SHMBUS_RESERVED, memory_order_relaxed);
    make_visible(self, at);
}

void writer_commit(struct writer *self, const struct reservation *at) {
    intend_commit(self, at);
    /* SYNC: record-published. */
    atomic_store_explicit(&at->record->state, SHMBUS_COMMITTED, memory_order_release);
    count_commit(self);
}

void writer_abort(struct writer *self, const struct reservation *at) {
    atomic_store_explicit(&at->record->state, SHMBUS_ABORTED, memory_order_release);
    FAILPOINT("abort-marked");
    self->aborted++;
    atomic_store_explicit(&self->slot->aborted, self->aborted, memory_order_release);
}

void writer_pin(struct writer *self, const struct reservation *at) {
    /* Before the record ends: a run is not freed while it holds an open record. */
    atomic_fetch_add_explicit(&self->segment->extents[at->place.extent].writer_pins, 1,
                              memory_order_relaxed);
}

void writer_unpin(struct segment *segment, const struct reservation *at) {
    atomic_fetch_sub_explicit(&segment->extents[at->place.extent].writer_pins, 1,
                              memory_order_release);
    doorbell_ring(segment->header);
}

/* Whether the commit that an owner intended took effect: the record shows it. */
static bool commit_happened(const struct segment *segment, const struct producer_slot *slot) {
    uint64_t reference = atomic_load_explicit(&slot->commit_ref, memory_order_relaxed);
    uint32_t generation = atomic_load_explicit(&slot->commit_generation, memory_order_relaxed);
    uint64_t extent = reference >> 40;
    uint64_t offset = (reference & ((UINT64_C(1) << 40) - 1)) * SHMBUS_RECORD_ALIGN;
    if (extent >= segment->extent_count ||
        offset > (segment->extent_count - extent) * segment->extent_bytes -
                     sizeof(struct record_header)) {
        return false;
    }
    const struct extent_desc *desc = &segment->extents[extent];
    if (link_generation(atomic_load_explicit(&desc->word, memory_order_acquire)) != generation) {
        return true;
    }
    const struct record_header *record =
        (const void *)(segment_extent(segment, (uint32_t)extent) + offset);
    uint32_t state = atomic_load_explicit(&record->state, memory_order_acquire);
    return offset < atomic_load_explicit(&desc->used, memory_order_acquire) &&
           (state == SHMBUS_COMMITTED || state == SHMBUS_RELEASED);
}

/* Counts a commit that was under way if it took effect. The intent ends here in any case: left
 * behind, it would count for the slot's next owner, whose extents are others. */
static void finish_commit(struct segment *segment, struct producer_slot *slot) {
    uint64_t committed = atomic_load_explicit(&slot->committed, memory_order_relaxed);
    /* SYNC: commit-intended. */
    if (atomic_load_explicit(&slot->committing, memory_order_acquire) == committed + 1 &&
        commit_happened(segment, slot)) {
        atomic_store_explicit(&slot->committed, committed + 1, memory_order_release);
    }
    atomic_store_explicit(&slot->committing, 0, memory_order_release);
}

/* Seals a run of the chain unless it is: one that is sealed may be freed, and be somebody else's,
 * at any time. False if the link names no run of this slot, or none behind the last one. */
static bool seal_linked(struct segment *segment, uint64_t link, uint32_t slot_index,
                        const struct run *last, struct run *run) {
    uint32_t low = link_low(link);
    if (low == 0 || low > segment->extent_count) {
        return false;
    }
    _Atomic uint32_t *sealed = &segment->extents[low - 1].sealed;
    bool was_sealed = atomic_load_explicit(sealed, memory_order_acquire) != 0;
    if (!link_is_run(segment, link, slot_index, run) ||
        (last->span != 0 && run->order <= last->order)) {
        return false;
    }
    if (!was_sealed) {
        atomic_store_explicit(sealed, 1, memory_order_release);
    }
    return true;
}

/* Follows the chain to its end, which the owner may not have had time to note, and seals it. */
static void seal_chain(struct segment *segment, struct producer_slot *slot, uint32_t slot_index) {
    uint64_t noted = atomic_load_explicit(&slot->current, memory_order_acquire);
    uint64_t first = atomic_load_explicit(&slot->first, memory_order_acquire);
    uint64_t next_order = atomic_load_explicit(&slot->next_order, memory_order_relaxed);
    uint64_t link = noted;
    struct run run, last = {.span = 0};
    for (;;) {
        if (!seal_linked(segment, link, slot_index, &last, &run)) {
            /* SYNC: run-noted. The reader may have freed that run, and noted the one behind it. */
            uint64_t now = atomic_load_explicit(&slot->current, memory_order_acquire);
            if (now != noted) {
                link = noted = now;
                continue;
            }
            /* Or it may have ended the chain, and the owner begun another with its newest run; any
             * other first run is an old one, which a straggler keeps. */
            link = first;
            if (!seal_linked(segment, link, slot_index, &last, &run) ||
                run.order + 1 != next_order) {
                return;
            }
        }
        last = run;
        if (link != noted && atomic_compare_exchange_strong_explicit(
                                 &slot->current, &noted, link, memory_order_acq_rel,
                                 memory_order_acquire)) {
            noted = link;
        }
        link = atomic_load_explicit(&segment->extents[link_low(link) - 1].next,
                                    memory_order_acquire);
    }
}

/* Frees leases that never got their place in the chain; they hold no record. Heads come before
 * their tails here and are freed after them by the reader, so a tail seen without head is free. Of
 * the collector's, one stays leased: on a full bus its successor would not get another. */
static uint32_t free_orphans(struct segment *segment, uint32_t slot_index) {
    uint32_t covered = 0;
    uint32_t kept = NO_EXTENT;
    for (uint32_t i = 0; i < segment->extent_count; i++) {
        struct extent_desc *desc = &segment->extents[i];
        struct run run;
        if (extent_is_run(segment, i, slot_index, &run)) {
            bool linked = atomic_load_explicit(&desc->sealed, memory_order_acquire) != 0 ||
                          atomic_load_explicit(&desc->used, memory_order_acquire) != 0;
            if (linked) {
                covered = i + run.span;
                continue;
            }
        }
        uint64_t word = atomic_load_explicit(&desc->word, memory_order_acquire);
        if (i < covered || link_low(word) != slot_index + 1) {
            continue;
        }
        if (slot_index == segment->max_producers && kept == NO_EXTENT) {
            extent_renew(segment, i, word);
            kept = i;
        } else {
            extent_unlease(segment, i, word);
        }
    }
    return kept;
}

static uint32_t take_over(struct segment *segment, uint32_t slot_index) {
    struct producer_slot *slot = &segment->slots[slot_index];
    finish_commit(segment, slot);
    FAILPOINT("take-over-counted");
    seal_chain(segment, slot, slot_index);
    FAILPOINT("take-over-sealed");
    uint32_t kept = free_orphans(segment, slot_index);
    atomic_store_explicit(&slot->state, SHMBUS_SLOT_FREE, memory_order_release);
    atomic_fetch_add_explicit(&segment->header->attach_epoch, 1, memory_order_release);
    doorbell_space_freed(segment->header, segment->extent_count);
    return kept;
}

void writer_take_over(struct segment *segment, uint32_t slot_index) {
    const struct producer_slot *slot = &segment->slots[slot_index];
    if (atomic_load_explicit(&slot->state, memory_order_acquire) != SHMBUS_SLOT_FREE) {
        take_over(segment, slot_index);
    }
}

void writer_attach_collector(struct writer *self, struct segment *segment) {
    uint32_t spare = take_over(segment, segment->max_producers);
    begin(self, segment, segment->max_producers);
    if (spare != NO_EXTENT) {
        self->spare = spare;
        self->spare_generation = extent_generation(segment, spare);
    }
}
