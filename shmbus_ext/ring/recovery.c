/* Completing the work of a dead producer (see recovery.h). */
#define _GNU_SOURCE
#include "recovery.h"

#include <unistd.h>

#include "ring/observe.h"
#include "base/clock.h"
#include "base/failpoints.h"
#include "base/file_lock.h"
#include "lead.h"
#include "relay_journal.h"

/* Returns true if the owner's intended commit took effect, as shown by the record. */
static bool commit_happened(const struct segment *segment, const struct producer_slot *slot) {
    uint32_t generation = RELAXED(slot->commit_generation);
    struct record_place at = place_unpack(RELAXED(slot->commit_ref));
    if (at.extent >= segment->extent_count ||
        at.offset > (segment->extent_count - at.extent) * segment->extent_bytes -
                        sizeof(struct record_header)) {
        return false;
    }
    const struct extent_desc *desc = &segment->extents[at.extent];
    if (link_generation(ACQUIRE(desc->word)) != generation) {
        return true;
    }
    const struct record_header *record =
        (const void *)(segment_extent(segment, at.extent) + at.offset);
    uint32_t state = ACQUIRE(record->state);
    return at.offset < ACQUIRE(desc->used) &&
           (shmbus_is_committed(state) || state == SHMBUS_RELEASED);
}

/* Counts an interrupted commit if it took effect, and always clears the intent: a stale intent
 * would count for the slot's next owner with different extents. */
static void finish_commit(struct segment *segment, struct producer_slot *slot) {
    uint64_t committed = RELAXED(slot->committed);
    /* SYNC: commit-intended. */
    uint64_t committing = ACQUIRE(slot->committing);
    if (committing > committed && committing - committed <= SHMBUS_MAX_GROUP_SIZE &&
        commit_happened(segment, slot)) {
        SET_RELEASE(slot->committed, committing);
    }
    SET_RELEASE(slot->committing, 0);
}

/* Seals a run of the chain unless already sealed: another slot may free and lease a sealed run at
 * any time. False if the link names no run of this slot, or a run not later than the last. */
static bool seal_linked(struct segment *segment, uint64_t link, uint32_t slot_index,
                        const struct run *last, struct run *run) {
    uint32_t low = link_low(link);
    if (low == 0 || low > segment->extent_count) {
        return false;
    }
    _Atomic uint32_t *sealed = &segment->extents[low - 1].sealed;
    bool was_sealed = ACQUIRE(*sealed) != 0;
    if (!link_is_run(segment, link, slot_index, run) ||
        (last->span != 0 && run->order <= last->order)) {
        return false;
    }
    if (!was_sealed) {
        SET_RELEASE(*sealed, 1);
    }
    return true;
}

/* Follows and seals the chain to its end, which the dead owner may not have noted. */
static void seal_chain(struct segment *segment, struct producer_slot *slot, uint32_t slot_index) {
    uint64_t noted = ACQUIRE(slot->current);
    uint64_t first = ACQUIRE(slot->first);
    uint64_t next_order = RELAXED(slot->next_order);
    uint64_t link = noted;
    struct run run, last = {.span = 0};
    for (;;) {
        if (!seal_linked(segment, link, slot_index, &last, &run)) {
            /* SYNC: run-noted. The reader may have freed the run, and noted its successor. */
            uint64_t now = ACQUIRE(slot->current);
            if (now != noted) {
                link = noted = now;
                continue;
            }
            /* Or the reader ended the chain, and the owner began a new chain with its newest run.
             * An older first run merely serves a straggler. */
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
        link = ACQUIRE(segment->extents[link_low(link) - 1].next);
    }
}

/* Frees leases without a place in the chain; they hold no record. The scan meets the first extent
 * of a run before the run's tail, and the reader frees the first extent last: a tail extent met
 * without its first extent is free. The collector keeps one extent, scarce on a full bus. */
static uint32_t free_orphans(struct segment *segment, uint32_t slot_index) {
    uint32_t covered = 0;
    uint32_t kept = NO_EXTENT;
    for (uint32_t i = 0; i < segment->extent_count; i++) {
        struct extent_desc *desc = &segment->extents[i];
        struct run run;
        if (extent_is_run(segment, i, slot_index, &run)) {
            bool linked = ACQUIRE(desc->sealed) != 0 || ACQUIRE(desc->used) != 0;
            if (linked) {
                covered = i + run.span;
                continue;
            }
        }
        uint64_t word = ACQUIRE(desc->word);
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
    if (slot_index < segment->max_producers) {
        lead_settle_all(segment, slot_index);
        request_reap(segment, RELAXED(slot->producer_id), RELAXED(slot->committed));
        relay_reap(segment, RELAXED(slot->producer_id), RELAXED(slot->committed));
        FAILPOINT("take-over-reopened");
    }
    seal_chain(segment, slot, slot_index);
    FAILPOINT("take-over-sealed");
    uint32_t kept = free_orphans(segment, slot_index);
    SET_RELEASE(slot->state, SHMBUS_SLOT_FREE);
    atomic_fetch_add_explicit(&segment->header->attach_epoch, 1, memory_order_release);
    bell_ring_for(&segment->header->space_bell, SPACE_FREED, segment->extent_count);
    return kept;
}

void recover_producer(struct segment *segment, uint32_t slot_index) {
    const struct producer_slot *slot = &segment->slots[slot_index];
    if (ACQUIRE(slot->state) != SHMBUS_SLOT_FREE) {
        take_over(segment, slot_index);
    }
}

uint32_t recover_collector(struct segment *segment) {
    return take_over(segment, segment->max_producers);
}

uint32_t recover_dead(struct segment *segment, uint32_t own_slot, uint32_t most) {
    _Atomic uint32_t *look_slot = &segment->header->look_slot;
    uint32_t slots = segment->max_producers;
    uint32_t at = RELAXED(*look_slot) % slots;
    uint32_t dead = 0;
    for (uint32_t looked = 0; looked < slots && most > 0; looked++, at = (at + 1) % slots) {
        uint32_t state = ACQUIRE(segment->slots[at].state);
        if (at == own_slot || state == SHMBUS_SLOT_FREE) {
            continue;
        }
        if (file_lock_take(segment->fd, SHMBUS_LOCK_SLOT + at) != LOCK_TAKEN) {
            most--;
            continue;
        }
        /* The owner has closed, or its process has ended. */
        dead += state == SHMBUS_SLOT_ACTIVE;
        FAILPOINT("sweep-locked");
        recover_producer(segment, at);
        file_lock_drop(segment->fd, SHMBUS_LOCK_SLOT + at);
    }
    SET_RELAXED(*look_slot, at);
    return dead;
}

bool recovery_elect(struct segment *segment) {
    _Atomic uint64_t *next = &segment->header->next_look_ns;
    uint64_t now = clock_monotonic_ns();
    uint64_t due = RELAXED(*next);
    /* No process stores a later time; an overwritten word must not end all looks. */
    if (due > now && due <= now + RECOVERY_COLLECTOR_NS) {
        return false;
    }
    return EXCHANGE(*next, due, now + RECOVERY_PERIOD_NS, memory_order_relaxed);
}

void recovery_reserve(struct segment *segment) {
    SET_RELAXED(segment->header->next_look_ns, clock_monotonic_ns() + RECOVERY_COLLECTOR_NS);
}

/* ---- Taking over after the last sink. */
/* Longest wait for another process that reaps the lane of a dead owner. */
#define HEALING_POLLS 2000
#define HEALING_POLL_US 1000

/* Returns true if the journal belongs to no living lane; reaps the lane of a dead owner. */
static bool is_healed(struct segment *segment) {
    const struct relay_journal *journal = segment->relay;
    uint64_t writer = ACQUIRE(journal->writer);
    uint32_t index = RELAXED(journal->slot);
    if (writer == 0) {
        return true;
    }
    if (index >= segment->max_producers ||
        file_lock_take(segment->fd, SHMBUS_LOCK_SLOT + index) != LOCK_TAKEN) {
        return false;
    }
    recover_producer(segment, index);
    /* The remainder was bound and never announced; reapers heal the journal. */
    relay_reap(segment, writer, ACQUIRE(segment->slots[index].committed));
    file_lock_drop(segment->fd, SHMBUS_LOCK_SLOT + index);
    return true;
}

enum relay_begun relay_begin(struct segment *segment) {
    enum lock_status lock = file_lock_take(segment->fd, SHMBUS_LOCK_RELAY);
    if (lock != LOCK_TAKEN) {
        return lock == LOCK_HELD_ELSEWHERE ? RELAY_BUSY : RELAY_SYSTEM_ERROR;
    }
    for (int poll = 0; !is_healed(segment); poll++) {
        if (poll == HEALING_POLLS) {
            file_lock_drop(segment->fd, SHMBUS_LOCK_RELAY);
            return RELAY_BUSY;
        }
        usleep(HEALING_POLL_US);
    }
    FAILPOINT("relay-healed");
    atomic_fetch_add_explicit(&segment->relay->incarnation, 1, memory_order_relaxed);
    return RELAY_BEGUN;
}

void relay_bind(struct segment *segment, const struct writer *writer) {
    SET_RELAXED(segment->relay->slot, writer->slot_index);
    SET_RELEASE(segment->relay->writer, writer->producer_id);
}
