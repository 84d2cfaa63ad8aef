/* The producer's side of a lane (see writer.h; LAYOUT.md has the ordering argument). */
#define _GNU_SOURCE

#include <unistd.h>

#include "ring/observe.h"
#include "base/clock.h"
#include "base/failpoints.h"
#include "base/file_lock.h"
#include "lead.h"
#include "recovery.h"
#include "relay_journal.h"

/* Passes over the slots: a reader in a recovery holds the slot's lock for a moment. */
#define ATTACH_PASSES 4
/* An unscheduled reader holds the lock longer: worth a wait. */
#define SLOT_PATIENCE_NS UINT64_C(500000000)
#define SLOT_POLL_US 1000
/* Period of a writer's check, at the end of a run, that the reader works. */
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
    self->committed = RELAXED(self->slot->committed);
    self->aborted = RELAXED(self->slot->aborted);
    self->last_link = RELAXED(self->slot->current);
    self->producer_id = atomic_fetch_add_explicit(&segment->header->next_producer_id, 1,
                                                  memory_order_relaxed);
}

static void announce(struct writer *self) {
    /* SYNC: slot-taken. This id tells a reader of its predecessor's death. */
    SET_RELEASE(self->slot->producer_id, self->producer_id);
    FAILPOINT("attach-named");
    SET_RELEASE(self->slot->state, SHMBUS_SLOT_ACTIVE);
    atomic_fetch_add_explicit(&self->segment->header->attach_epoch, 1, memory_order_release);
}

enum writer_status writer_attach(struct writer *self, struct segment *segment, const char *label) {
    for (int pass = 0; pass < ATTACH_PASSES; pass++) {
        for (uint32_t i = 0; i < segment->max_producers; i++) {
            struct producer_slot *slot = &segment->slots[i];
            uint32_t state = ACQUIRE(slot->state);
            if (pass == 0 && state != SHMBUS_SLOT_FREE) {
                continue;
            }
            enum lock_status lock = file_lock_take(segment->fd, SHMBUS_LOCK_SLOT + i);
            if (lock == LOCK_ERROR) {
                return WRITER_SYSTEM_ERROR;
            }
            if (lock == LOCK_HELD_ELSEWHERE) {
                continue;
            }
            FAILPOINT("attach-locked");
            recover_producer(segment, i);
            FAILPOINT("attach-taken-over");
            begin(self, segment, i);
            unmade_note(segment, i, 0, &(struct unmade){0});
            set_label(slot, label);
            SET_RELAXED(slot->pid, (uint32_t)getpid());
            announce(self);
            return WRITER_OK;
        }
    }
    return WRITER_NO_SLOT;
}

/* Returns true if a slot is not active, despite its held lock. */
static bool any_slot_in_passing(const struct segment *segment) {
    for (uint32_t i = 0; i < segment->max_producers; i++) {
        if (ACQUIRE(segment->slots[i].state) != SHMBUS_SLOT_ACTIVE) {
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
           any_slot_in_passing(segment) && clock_monotonic_ns() - began_ns < SLOT_PATIENCE_NS) {
        usleep(SLOT_POLL_US);
    }
    return status;
}

void writer_close(struct writer *self) {
    writer_seal(self);
    FAILPOINT("close-sealed");
    /* Claimed and unanswered samples go to other workers. */
    request_reap(self->segment, self->producer_id, self->committed);
    relay_reap(self->segment, self->producer_id, self->committed);
    SET_RELEASE(self->slot->state, SHMBUS_SLOT_CLOSED);
    atomic_fetch_add_explicit(&self->segment->header->attach_epoch, 1, memory_order_release);
    doorbell_ring(self->segment->header);
}

/* A reader misled by scribbled bytes frees a run in use; another lane may hold the run since. */
static bool holds_its_run(const struct writer *self) {
    return self->extent != NO_EXTENT && RELAXED(self->segment->extents[self->extent].word) ==
                                            link_make(self->generation, self->slot_index + 1);
}

void writer_seal(struct writer *self) {
    if (holds_its_run(self)) {
        /* SYNC: run-sealed. `used` is final. */
        SET_RELEASE(self->segment->extents[self->extent].sealed, 1);
    }
    self->extent = NO_EXTENT;
}

/* Links a run behind the lane's last one, or as a new first after an ended chain. */
static void link_run(struct writer *self, uint64_t link) {
    bool linked = false;
    if (link_low(self->last_link) != 0 &&
        link_low(self->last_link) <= self->segment->extent_count) {
        uint32_t last = link_low(self->last_link) - 1;
        uint64_t expected = link_make(link_generation(self->last_link), 0);
        /* SYNC: run-linked. */
        linked = EXCHANGE(self->segment->extents[last].next, expected, link, memory_order_release);
    }
    if (!linked) {
        SET_RELEASE(self->slot->first, link);
    }
    FAILPOINT("run-linked");
    /* SYNC: run-noted. */
    SET_RELEASE(self->slot->current, link);
    self->last_link = link;
}

/* Checks if the reader, if present, has looked at the bus since the last call. */
static void look_back(struct writer *self) {
    const struct bus_header *header = self->segment->header;
    uint64_t now_ns = clock_monotonic_ns();
    if (now_ns - self->looked_back_ns < LOOK_BACK_NS) {
        return;
    }
    uint64_t seen_ns = RELAXED(header->collector_seen_ns);
    self->ahead = seen_ns < self->looked_back_ns && RELAXED(header->collector_pid) != 0;
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
    /* SYNC: run-noted. A process that sees this order sees the note of the previous run. */
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
    if (!holds_its_run(self) || bytes > self->run_bytes - self->used) {
        enum writer_status status = next_run(self, bytes);
        if (status != WRITER_OK) {
            return status;
        }
    }
    out->admitted = 0;
    out->answers.number = 0;
    out->bytes = bytes;
    out->place.extent = self->extent;
    out->place.generation = self->generation;
    out->place.offset = self->used;
    out->record = (struct record_header *)(void *)(segment_extent(self->segment, self->extent) +
                                                   self->used);
    return WRITER_OK;
}

/* Until `committed` has grown by n, a successor decides from this intent if the commit of n records
 * took effect: from the first record, since the rest becomes visible with the first. */
static inline __attribute__((always_inline)) void
intend(struct writer *self, const struct reservation *at, uint32_t n) {
    SET_RELAXED(self->slot->commit_ref, place_pack(&at->place));
    SET_RELAXED(self->slot->commit_generation, at->place.generation);
    /* SYNC: commit-intended. */
    SET_RELEASE(self->slot->committing, self->committed + n);
    FAILPOINT("commit-intended");
}

/* False if the record answers a lost claim. */
static bool intend_commit(struct writer *self, const struct reservation *at) {
    intend(self, at, 1);
    if (at->answers.number != 0 &&
        !request_answer(self->segment, &at->answers, self->committed + 1)) {
        SET_RELEASE(self->slot->committing, 0);
        return false;
    }
    record_close(at->record, at->bytes, self->sequence, self->committed);
    return true;
}

static void count_commits(struct writer *self, const struct reservation *at, uint32_t n) {
    FAILPOINT("commit-marked");
    self->sequence += n;
    self->committed += n;
    /* SYNC: lane-advanced. A reader that sees the count sees the record. */
    SET_RELEASE(self->slot->committed, self->committed);
    if (at->admitted != 0) {
        lead_settle(self->segment, at->admitted, self->slot_index);
    }
    if (at->answers.number != 0) {
        request_answered(self->segment, &at->answers);
    }
}

static void make_visible(struct writer *self, const struct reservation *at) {
    self->used = at->place.offset + at->bytes;
    /* SYNC: record-exposed. After the frame. */
    SET_RELEASE(self->segment->extents[at->place.extent].used, self->used);
    FAILPOINT("record-exposed");
}

bool writer_publish(struct writer *self, const struct reservation *at) {
    if (!intend_commit(self, at)) {
        return false;
    }
    /* SYNC: record-published. */
    SET_RELEASE(at->record->state, SHMBUS_COMMITTED);
    FAILPOINT("record-published");
    make_visible(self, at);
    count_commits(self, at, 1);
    return true;
}

void writer_publish_all(struct writer *self, const struct reservation *at, uint32_t n) {
    intend(self, at, n);
    for (uint32_t i = 0; i < n; i++) {
        record_close(at[i].record, at[i].bytes, self->sequence + i, self->committed + i);
        /* SYNC: record-published. */
        SET_RELEASE(at[i].record->state, SHMBUS_COMMITTED);
    }
    FAILPOINT("group-filled");
    make_visible(self, &at[n - 1]);
    count_commits(self, at, n);
}

void writer_publish_moved(struct writer *self, const struct reservation *at, uint32_t state) {
    record_reseal(at->record, at->bytes);
    SET_RELEASE(at->record->state, state);
    make_visible(self, at);
}

void writer_keep_spare(struct writer *self) {
    if (self->spare == NO_EXTENT && segment_reserved(self->segment) > 0) {
        self->spare =
            extent_lease(self->segment, self->slot_index, 1, &self->spare_generation);
    }
}

void writer_reserve(struct writer *self, const struct reservation *at) {
    SET_RELAXED(at->record->state, SHMBUS_RESERVED);
    make_visible(self, at);
}

bool writer_commit(struct writer *self, const struct reservation *at) {
    if (!intend_commit(self, at)) {
        return false;
    }
    /* SYNC: record-published. */
    SET_RELEASE(at->record->state, SHMBUS_COMMITTED);
    count_commits(self, at, 1);
    return true;
}

void writer_abort(struct writer *self, const struct reservation *at) {
    SET_RELEASE(at->record->state, SHMBUS_ABORTED);
    FAILPOINT("abort-marked");
    self->aborted++;
    SET_RELEASE(self->slot->aborted, self->aborted);
    if (at->admitted != 0) {
        lead_withdraw(self->segment, at->admitted, self->slot_index);
    }
}

void writer_pin(struct writer *self, const struct reservation *at) {
    /* Precedes the end of the record: a run with an open record is never freed. */
    atomic_fetch_add_explicit(&self->segment->extents[at->place.extent].writer_pins, 1,
                              memory_order_relaxed);
}

void writer_unpin(struct segment *segment, const struct reservation *at) {
    atomic_fetch_sub_explicit(&segment->extents[at->place.extent].writer_pins, 1,
                              memory_order_release);
    doorbell_ring(segment->header);
}

void writer_attach_collector(struct writer *self, struct segment *segment) {
    uint32_t spare = recover_collector(segment);
    begin(self, segment, segment->max_producers);
    if (spare != NO_EXTENT) {
        self->spare = spare;
        self->spare_generation = extent_generation(segment, spare);
    }
}
