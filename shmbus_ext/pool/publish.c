/* Writing a version (see pool.h). */
#define _GNU_SOURCE
#include "pool/pool.h"

#include <stdio.h>
#include <string.h>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/failpoints.h"
#include "base/file_lock.h"

static void set_state(struct pool *self, uint32_t slot, uint32_t state) {
    /* SYNC: pool-slot. The row and the payload precede the state that vouches for them. */
    SET_RELEASE(self->slot_rows[slot].state, state);
}

/* Returns true if a rank still writes into the slot, for this publisher or for a dead
 * predecessor. */
static bool has_writer(const struct pool *self, uint32_t slot) {
    int64_t start = pool_lock_piece(slot, 0), bytes = POOL_MAX_RANKS;
    return file_lock_find(self->file.fd, &start, &bytes) != LOCK_TAKEN;
}

static bool take_slot(struct pool *self, uint32_t slot) {
    /* A process does not block itself by its own lock. */
    if ((self->own_writes >> slot & 1u) != 0) {
        return false;
    }
    if (file_lock_take(self->file.fd, pool_lock_slot(slot)) != LOCK_TAKEN) {
        return false;
    }
    FAILPOINT("pool-slot-locked");
    /* SYNC: pool-writing. Clear first: a late rank finds the word cleared, or its lock is found
     * here. */
    (void)atomic_exchange_explicit(&self->header->writing, 0, memory_order_seq_cst);
    if (has_writer(self, slot)) {
        file_lock_drop(self->file.fd, pool_lock_slot(slot));
        return false;
    }
    return true;
}

/* The free slot with the oldest write; max_slots if every slot is taken. */
static uint32_t choose_slot(struct pool *self) {
    uint32_t newest = pool_word_slot(RELAXED(self->header->latest));
    uint32_t open = ACQUIRE(self->header->slots_open);
    bool tried[POOL_MAX_SLOTS] = {false};
    open = open < self->max_slots ? open : self->max_slots;
    for (uint32_t n = 0; n < open; n++) {
        uint32_t oldest = POOL_MAX_SLOTS;
        for (uint32_t i = 0; i < open; i++) {
            if (i != newest && !tried[i] &&
                (oldest == POOL_MAX_SLOTS ||
                 self->slot_rows[i].sequence < self->slot_rows[oldest].sequence)) {
                oldest = i;
            }
        }
        if (oldest == POOL_MAX_SLOTS) {
            break;
        }
        if (take_slot(self, oldest)) {
            return oldest;
        }
        tried[oldest] = true;
    }
    return self->max_slots;
}

/* Returns true, with the row, if a slot holds a whole version of the same tensors and ranks. */
static bool has_alike(const struct pool *self, uint32_t slot, const struct version_facts *facts,
                      uint32_t meta_crc, struct slot_row *row) {
    return slot < self->max_slots && lease_peek(self, slot, row) && row->bytes == facts->bytes &&
           row->meta_bytes == facts->meta_bytes && row->meta_crc == meta_crc &&
           row->ranks == facts->ranks;
}

/* Notes the base for a patch of the version, and the version still in the slot. */
static void note_bases(struct pool *self, uint32_t at, const struct version_facts *facts,
                       struct slot_row *to) {
    uint32_t newest = pool_word_slot(RELAXED(self->header->latest));
    uint32_t meta_crc = shmbus_crc32c(0, facts->meta, facts->meta_bytes);
    struct slot_row row;
    bool wanted = facts->patches && self->patch_bytes > 0;
    to->base_sequence = to->kept_sequence = 0;
    to->base_version = 0;
    if (wanted && has_alike(self, newest, facts, meta_crc, &row)) {
        to->base_sequence = row.sequence;
        to->base_version = row.version;
    }
    if (wanted && has_alike(self, at, facts, meta_crc, &row)) {
        to->kept_sequence = row.sequence;
    }
}

enum shared_status publish_begin(struct pool *self, const struct version_facts *facts,
                               uint32_t *slot, uint64_t *sequence) {
    uint32_t at = choose_slot(self);
    if (at >= self->max_slots) {
        return SHARED_NOTHING;
    }
    struct slot_row *row = &self->slot_rows[at];
    struct slot_row bases;
    note_bases(self, at, facts, &bases);
    set_state(self, at, POOL_WRITING);
    FAILPOINT("pool-writing");
    uint64_t number =
        atomic_fetch_add_explicit(&self->header->next_sequence, 1, memory_order_relaxed);
    row->sequence = number;
    row->version = facts->version;
    row->bytes = facts->bytes;
    row->meta_bytes = facts->meta_bytes;
    row->meta_crc = shmbus_crc32c(0, facts->meta, facts->meta_bytes);
    row->digests = 0;
    row->ranks = facts->ranks;
    row->published_unix_ns = 0;
    row->base_sequence = bases.base_sequence;
    row->kept_sequence = bases.kept_sequence;
    row->base_version = bases.base_version;
    memset(row->text, 0, sizeof row->text);
    snprintf(row->text, sizeof row->text, "%s", facts->text);
    memcpy(pool_meta(self, at), facts->meta, facts->meta_bytes);
    /* SYNC: pool-writing. The row precedes the word that leads ranks to the row. */
    atomic_store_explicit(&self->header->writing, pool_word(number, at), memory_order_seq_cst);
    FAILPOINT("pool-announced");
    bell_ring(&self->header->ranks_bell, BELL_ALL);
    self->own_writes |= UINT32_C(1) << at;
    *slot = at;
    *sequence = number;
    return SHARED_OK;
}

void publish_finish(struct pool *self, uint32_t slot, uint64_t sequence, uint32_t digests) {
    struct pool_header *header = self->header;
    struct slot_row *row = &self->slot_rows[slot];
    row->sequence = sequence;
    row->digests = digests;
    row->published_unix_ns = clock_realtime_ns();
    row->crc = shmbus_crc32c(0, (const uint8_t *)row + POOL_ROW_CRC_FROM,
                             sizeof *row - POOL_ROW_CRC_FROM);
    FAILPOINT("pool-written");
    set_state(self, slot, POOL_READY);
    FAILPOINT("pool-ready");
    self->own_writes &= ~(UINT32_C(1) << slot);
    /* Unlock first: otherwise readers would spin while the publisher is preempted here. */
    file_lock_drop(self->file.fd, pool_lock_slot(slot));
    FAILPOINT("pool-unlocked");
    /* SYNC: pool-latest. */
    SET_RELEASE(header->latest, pool_word(sequence, slot));
    FAILPOINT("pool-latest");
    /* SYNC: pool-writing. After latest: a rank that finds neither word knows of the give-up. */
    atomic_store_explicit(&header->writing, 0, memory_order_seq_cst);
    atomic_fetch_add_explicit(&header->published, 1, memory_order_relaxed);
    bell_ring(&header->bell, BELL_ALL);
    FAILPOINT("pool-rung");
    bell_ring(&header->ranks_bell, BELL_ALL);
}

void publish_give_up(struct pool *self) {
    /* SYNC: pool-writing. */
    (void)atomic_exchange_explicit(&self->header->writing, 0, memory_order_seq_cst);
    bell_ring(&self->header->ranks_bell, BELL_ALL);
}

void publish_let_go(struct pool *self, uint32_t slot) {
    set_state(self, slot, POOL_EMPTY);
    self->own_writes &= ~(UINT32_C(1) << slot);
    file_lock_drop(self->file.fd, pool_lock_slot(slot));
}

void publish_count_skipped(struct pool *self) {
    atomic_fetch_add_explicit(&self->header->skipped, 1, memory_order_relaxed);
}

enum shared_status publish_join(struct pool *self, uint32_t *slot, struct slot_row *row) {
    struct rank_row *mine = &self->rank_rows[self->rank];
    uint32_t rank = (uint32_t)self->rank;
    /* SYNC: pool-writing. */
    uint64_t word = atomic_load_explicit(&self->header->writing, memory_order_seq_cst);
    uint64_t sequence = pool_word_sequence(word);
    uint32_t at = pool_word_slot(word);
    if (word == 0 || sequence <= RELAXED(mine->done) || sequence <= RELAXED(mine->failed)) {
        return SHARED_NOTHING;
    }
    if (at >= self->max_slots) {
        return SHARED_DAMAGED;
    }
    /* A piece given up with live arrays still blocks this rank. */
    if ((self->own_writes >> at & 1u) != 0 ||
        file_lock_take(self->file.fd, pool_lock_piece(at, rank)) != LOCK_TAKEN) {
        return SHARED_HELD;
    }
    FAILPOINT("pool-piece-locked");
    /* SYNC: pool-writing. Again, under the lock: with the word gone, the slot may be gone too. */
    if (atomic_load_explicit(&self->header->writing, memory_order_seq_cst) != word) {
        file_lock_drop(self->file.fd, pool_lock_piece(at, rank));
        return SHARED_NOTHING;
    }
    memcpy(row, &self->slot_rows[at], sizeof *row);
    if (row->sequence != sequence || row->bytes > self->slot_bytes ||
        row->meta_bytes > self->meta_bytes) {
        file_lock_drop(self->file.fd, pool_lock_piece(at, rank));
        return SHARED_DAMAGED;
    }
    if (rank >= row->ranks) {
        /* The publisher does not wait for this rank, and may leave the slot at any moment. */
        file_lock_drop(self->file.fd, pool_lock_piece(at, rank));
        return SHARED_NOTHING;
    }
    self->own_writes |= UINT32_C(1) << at;
    SET_RELEASE(mine->started, sequence);
    FAILPOINT("pool-piece-begun");
    *slot = at;
    return SHARED_OK;
}

void publish_piece_done(struct pool *self, uint64_t sequence) {
    FAILPOINT("pool-piece-written");
    /* SYNC: pool-piece. The piece precedes the word that vouches for it. */
    SET_RELEASE(self->rank_rows[self->rank].done, sequence);
    FAILPOINT("pool-piece-done");
    bell_ring(&self->header->ranks_bell, BELL_ALL);
}

void publish_piece_failed(struct pool *self, uint64_t sequence, const char *error) {
    struct rank_row *mine = &self->rank_rows[self->rank];
    snprintf(mine->error, sizeof mine->error, "%s", error);
    SET_RELEASE(mine->failed, sequence);
    bell_ring(&self->header->ranks_bell, BELL_ALL);
}

void publish_piece_let_go(struct pool *self, uint32_t slot) {
    self->own_writes &= ~(UINT32_C(1) << slot);
    file_lock_drop(self->file.fd, pool_lock_piece(slot, (uint32_t)self->rank));
    bell_ring(&self->header->space_bell, BELL_ALL);
}

enum shared_status publish_outcome(const struct pool *self, uint64_t sequence) {
    /* SYNC: pool-writing. Before latest, because the publisher stores latest first. */
    uint64_t word = atomic_load_explicit(&self->header->writing, memory_order_seq_cst);
    /* SYNC: pool-latest. */
    uint64_t latest = ACQUIRE(self->header->latest);
    if (pool_word_sequence(latest) >= sequence) {
        return SHARED_OK;
    }
    if (pool_word_sequence(word) != sequence) {
        return SHARED_GONE;
    }
    if (rows_writer_life(self, 0) == ROW_ALIVE) {
        return SHARED_NOTHING;
    }
    /* The publisher may have finished after the looks, before its death. */
    latest = ACQUIRE(self->header->latest);
    return pool_word_sequence(latest) >= sequence ? SHARED_OK : SHARED_GONE;
}

enum piece_state publish_piece_state(const struct pool *self, uint64_t sequence, uint32_t rank) {
    const struct rank_row *row = &self->rank_rows[rank];
    enum row_life life = rows_writer_life(self, rank);
    /* SYNC: pool-piece. Read after the lock: a dead rank's finished piece counts. */
    if (ACQUIRE(row->done) == sequence) {
        return PIECE_DONE;
    }
    if (ACQUIRE(row->failed) == sequence) {
        return PIECE_FAILED;
    }
    bool begun = ACQUIRE(row->started) == sequence;
    if (life != ROW_ALIVE) {
        return begun ? PIECE_DEAD : PIECE_ABSENT;
    }
    return begun ? PIECE_BEGUN : PIECE_AWAITED;
}
