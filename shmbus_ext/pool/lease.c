/* Leasing a version (see pool.h). */
#define _GNU_SOURCE
#include "pool/pool.h"

#include <string.h>

#include "base/checksum.h"
#include "base/failpoints.h"
#include "base/file_lock.h"

/* Only a publication makes a try fail. A reader with this many failed tries was repeatedly
 * preempted; its caller continues after a look at the deadline. */
#define LEASE_TRIES 64

uint64_t lease_newest(const struct pool *self) {
    /* SYNC: pool-latest. */
    return ACQUIRE(self->header->latest);
}

static void note_held(struct pool *self, uint32_t slot, bool held) {
    if (self->reader < 0) {
        return;
    }
    _Atomic uint32_t *holds = &self->reader_rows[self->reader].holds;
    uint32_t now = RELAXED(*holds);
    uint32_t bit = UINT32_C(1) << slot;
    SET_RELAXED(*holds, held ? now | bit : now & ~bit);
}

/* Check and use the copy, never the shared original. */
static bool row_holds(const struct pool *self, const struct slot_row *row) {
    uint32_t crc = shmbus_crc32c(0, (const uint8_t *)row + POOL_ROW_CRC_FROM,
                                 sizeof *row - POOL_ROW_CRC_FROM);
    return crc == row->crc && row->bytes <= self->slot_bytes &&
           row->meta_bytes <= self->meta_bytes && row->digests <= pool_digest_room(self) &&
           row->ranks >= 1 && row->ranks <= POOL_MAX_RANKS;
}

bool lease_peek(const struct pool *self, uint32_t slot, struct slot_row *row) {
    struct slot_row *shared = &self->slot_rows[slot];
    /* SYNC: pool-slot. */
    uint32_t state = ACQUIRE(shared->state);
    memcpy(row, shared, sizeof *row);
    return state == POOL_READY && row_holds(self, row);
}

/* Drops a lock taken for a look; leases of this process stay. */
static void let_go(struct pool *self, uint32_t slot) {
    if (self->leases[slot] == 0) {
        file_lock_drop(self->file.fd, pool_lock_slot(slot));
        note_held(self, slot, false);
    }
}

enum shared_status lease_latest(struct pool *self, uint64_t after, uint32_t *slot,
                              struct slot_row *row) {
    for (int i = 0; i < LEASE_TRIES; i++) {
        uint64_t word = lease_newest(self);
        uint32_t at = pool_word_slot(word);
        if (word == POOL_NO_VERSION || pool_word_sequence(word) <= after) {
            return SHARED_NOTHING;
        }
        if (at >= self->max_slots) {
            return SHARED_DAMAGED;
        }
        /* Before the lock, to let a blocked publisher name the holder. */
        note_held(self, at, true);
        enum lock_status lock = self->leases[at] > 0
                                    ? LOCK_TAKEN
                                    : file_lock_share(self->file.fd, pool_lock_slot(at));
        if (lock != LOCK_TAKEN) {
            note_held(self, at, false);
            if (lock == LOCK_ERROR) {
                return SHARED_SYSTEM_ERROR;
            }
            continue; /* no longer the newest */
        }
        FAILPOINT("pool-lease-locked");
        bool whole = lease_peek(self, at, row) && row->sequence == pool_word_sequence(word);
        if (whole) {
            self->leases[at]++;
            *slot = at;
            FAILPOINT("pool-leased");
            return SHARED_OK;
        }
        let_go(self, at);
        bell_ring(&self->header->space_bell, BELL_ALL);
        /* No publisher takes the newest slot: an incomplete newest slot was scribbled on. */
        if (lease_newest(self) == word) {
            return SHARED_DAMAGED;
        }
    }
    return SHARED_HELD;
}

/* The slot with the highest sequence below a limit; a look that takes no lock. */
static bool newest_of(struct pool *self, int64_t version, uint64_t below, uint32_t *at,
                      struct slot_row *row) {
    bool any = false;
    for (uint32_t slot = 0; slot < self->max_slots; slot++) {
        struct slot_row seen;
        if (lease_peek(self, slot, &seen) && seen.version == version && seen.sequence < below &&
            (!any || seen.sequence > row->sequence)) {
            *at = slot;
            *row = seen;
            any = true;
        }
    }
    return any;
}

enum shared_status lease_version(struct pool *self, int64_t version, uint32_t *slot,
                               struct slot_row *row) {
    enum shared_status found = SHARED_NOTHING;
    uint32_t at;
    /* Between versions with one number from two lives, prefer the newer. */
    for (uint64_t below = UINT64_MAX; newest_of(self, version, below, &at, row);) {
        below = row->sequence;
        note_held(self, at, true);
        enum lock_status lock = self->leases[at] > 0
                                    ? LOCK_TAKEN
                                    : file_lock_share(self->file.fd, pool_lock_slot(at));
        if (lock != LOCK_TAKEN) {
            note_held(self, at, false);
            found = lock == LOCK_ERROR ? SHARED_SYSTEM_ERROR : found;
            continue;
        }
        /* The lock excludes writers: a whole version now stays whole. */
        if (lease_peek(self, at, row) && row->version == version) {
            self->leases[at]++;
            *slot = at;
            return SHARED_OK;
        }
        let_go(self, at);
        bell_ring(&self->header->space_bell, BELL_ALL);
    }
    return found;
}

void lease_drop(struct pool *self, uint32_t slot) {
    self->leases[slot]--;
    if (self->leases[slot] == 0) {
        let_go(self, slot);
        FAILPOINT("pool-let-go");
        bell_ring(&self->header->space_bell, BELL_ALL);
    }
}
