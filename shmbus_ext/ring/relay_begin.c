/* Taking over after the last sink (see relay_begin.h). */
#define _GNU_SOURCE
#include "relay_begin.h"

#include <unistd.h>

#include "base/failpoints.h"
#include "base/file_lock.h"
#include "recovery.h"
#include "relay_journal.h"

/* How long a lane whose owner has died may be in the hands of another that reaps it. */
#define HEALING_POLLS 2000
#define HEALING_POLL_US 1000

/* Whether the journal belongs to no living lane; one whose owner is dead is reaped here. */
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
    /* Every reaper of that slot heals the journal; what is left here was bound and never
     * announced. */
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
            relay_end(segment);
            return RELAY_BUSY;
        }
        usleep(HEALING_POLL_US);
    }
    FAILPOINT("relay-healed");
    atomic_fetch_add_explicit(&segment->relay->incarnation, 1, memory_order_relaxed);
    return RELAY_BEGUN;
}

void relay_end(struct segment *segment) { file_lock_drop(segment->fd, SHMBUS_LOCK_RELAY); }

void relay_bind(struct segment *segment, const struct writer *writer) {
    atomic_store_explicit(&segment->relay->slot, writer->slot_index, memory_order_relaxed);
    atomic_store_explicit(&segment->relay->writer, writer->producer_id, memory_order_release);
}
