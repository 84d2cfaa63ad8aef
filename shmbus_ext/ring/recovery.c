/* Completing the work of a dead producer (see recovery.h). */
#define _GNU_SOURCE
#include "recovery.h"

#include <stdbool.h>
#include <unistd.h>

#include "ring/observe.h"
#include "base/clock.h"
#include "base/failpoints.h"
#include "base/file_lock.h"
#include "lead.h"
#include "relay_journal.h"

/* Returns true if the owner's intended commit took effect, as shown by the record. */
static bool commit_happened(const struct segment *segment, const struct producer_slot *slot) {
    uint32_t generation = atomic_load_explicit(&slot->commit_generation, memory_order_relaxed);
    struct record_place at =
        place_unpack(atomic_load_explicit(&slot->commit_ref, memory_order_relaxed));
    if (at.extent >= segment->extent_count ||
        at.offset > (segment->extent_count - at.extent) * segment->extent_bytes -
                        sizeof(struct record_header)) {
        return false;
    }
    const struct extent_desc *desc = &segment->extents[at.extent];
    if (link_generation(atomic_load_explicit(&desc->word, memory_order_acquire)) != generation) {
        return true;
    }
    const struct record_header *record =
        (const void *)(segment_extent(segment, at.extent) + at.offset);
    uint32_t state = atomic_load_explicit(&record->state, memory_order_acquire);
    return at.offset < atomic_load_explicit(&desc->used, memory_order_acquire) &&
           (shmbus_is_committed(state) || state == SHMBUS_RELEASED);
}

/* Counts an interrupted commit if it took effect, and always clears the intent: a stale intent
 * would count for the slot's next owner with different extents. */
static void finish_commit(struct segment *segment, struct producer_slot *slot) {
    uint64_t committed = atomic_load_explicit(&slot->committed, memory_order_relaxed);
    /* SYNC: commit-intended. */
    uint64_t committing = atomic_load_explicit(&slot->committing, memory_order_acquire);
    if (committing > committed && committing - committed <= SHMBUS_MAX_GROUP_SIZE &&
        commit_happened(segment, slot)) {
        atomic_store_explicit(&slot->committed, committing, memory_order_release);
    }
    atomic_store_explicit(&slot->committing, 0, memory_order_release);
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

/* Follows and seals the chain to its end, which the dead owner may not have noted. */
static void seal_chain(struct segment *segment, struct producer_slot *slot, uint32_t slot_index) {
    uint64_t noted = atomic_load_explicit(&slot->current, memory_order_acquire);
    uint64_t first = atomic_load_explicit(&slot->first, memory_order_acquire);
    uint64_t next_order = atomic_load_explicit(&slot->next_order, memory_order_relaxed);
    uint64_t link = noted;
    struct run run, last = {.span = 0};
    for (;;) {
        if (!seal_linked(segment, link, slot_index, &last, &run)) {
            /* SYNC: run-noted. The reader may have freed the run, and noted its successor. */
            uint64_t now = atomic_load_explicit(&slot->current, memory_order_acquire);
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
        link = atomic_load_explicit(&segment->extents[link_low(link) - 1].next,
                                    memory_order_acquire);
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
    if (slot_index < segment->max_producers) {
        lead_settle_all(segment, slot_index);
        request_reap(segment, atomic_load_explicit(&slot->producer_id, memory_order_relaxed),
                     atomic_load_explicit(&slot->committed, memory_order_relaxed));
        relay_reap(segment, atomic_load_explicit(&slot->producer_id, memory_order_relaxed),
                   atomic_load_explicit(&slot->committed, memory_order_relaxed));
        FAILPOINT("take-over-reopened");
    }
    seal_chain(segment, slot, slot_index);
    FAILPOINT("take-over-sealed");
    uint32_t kept = free_orphans(segment, slot_index);
    atomic_store_explicit(&slot->state, SHMBUS_SLOT_FREE, memory_order_release);
    atomic_fetch_add_explicit(&segment->header->attach_epoch, 1, memory_order_release);
    bell_ring_for(&segment->header->space_bell, SPACE_FREED, segment->extent_count);
    return kept;
}

void recover_producer(struct segment *segment, uint32_t slot_index) {
    const struct producer_slot *slot = &segment->slots[slot_index];
    if (atomic_load_explicit(&slot->state, memory_order_acquire) != SHMBUS_SLOT_FREE) {
        take_over(segment, slot_index);
    }
}

uint32_t recover_collector(struct segment *segment) {
    return take_over(segment, segment->max_producers);
}

uint32_t recover_dead(struct segment *segment, uint32_t own_slot, uint32_t most) {
    _Atomic uint32_t *look_slot = &segment->header->look_slot;
    uint32_t slots = segment->max_producers;
    uint32_t at = atomic_load_explicit(look_slot, memory_order_relaxed) % slots;
    uint32_t dead = 0;
    for (uint32_t looked = 0; looked < slots && most > 0; looked++, at = (at + 1) % slots) {
        uint32_t state = atomic_load_explicit(&segment->slots[at].state, memory_order_acquire);
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
    atomic_store_explicit(look_slot, at, memory_order_relaxed);
    return dead;
}

bool recovery_elect(struct segment *segment) {
    _Atomic uint64_t *next = &segment->header->next_look_ns;
    uint64_t now = clock_monotonic_ns();
    uint64_t due = atomic_load_explicit(next, memory_order_relaxed);
    /* No process stores a later time; an overwritten word must not end all looks. */
    if (due > now && due <= now + RECOVERY_COLLECTOR_NS) {
        return false;
    }
    return atomic_compare_exchange_strong_explicit(next, &due, now + RECOVERY_PERIOD_NS,
                                                   memory_order_relaxed, memory_order_relaxed);
}

void recovery_reserve(struct segment *segment) {
    atomic_store_explicit(&segment->header->next_look_ns,
                          clock_monotonic_ns() + RECOVERY_COLLECTOR_NS, memory_order_relaxed);
}

/* ---- Taking over after the last sink. */
/* Longest wait for another process that reaps the lane of a dead owner. */
#define HEALING_POLLS 2000
#define HEALING_POLL_US 1000

/* Returns true if the journal belongs to no living lane; reaps the lane of a dead owner. */
static bool is_healed(struct segment *segment) {
    const struct relay_journal *journal = segment->relay;
    uint64_t writer = atomic_load_explicit(&journal->writer, memory_order_acquire);
    uint32_t index = atomic_load_explicit(&journal->slot, memory_order_relaxed);
    if (writer == 0) {
        return true;
    }
    if (index >= segment->max_producers ||
        file_lock_take(segment->fd, SHMBUS_LOCK_SLOT + index) != LOCK_TAKEN) {
        return false;
    }
    recover_producer(segment, index);
    /* The remainder was bound and never announced; reapers heal the journal. */
    relay_reap(segment, writer,
               atomic_load_explicit(&segment->slots[index].committed, memory_order_acquire));
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
    atomic_store_explicit(&segment->relay->slot, writer->slot_index, memory_order_relaxed);
    atomic_store_explicit(&segment->relay->writer, writer->producer_id, memory_order_release);
}
