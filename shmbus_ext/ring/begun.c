/* Samples that producers have begun (see begun.h). */
#include "begun.h"

#include "base/clock.h"
#include "lead.h"

/* Rows that are looked at from a sample's own place on: a table that is three quarters full has a
 * free one among so many, nearly always. */
#define PROBES 64u
#define WRITTEN UINT64_C(1)

static uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
    return value ^ (value >> 33);
}

uint64_t begun_key(const char *id, uint32_t id_bytes, int64_t round, uint32_t split) {
    return mixed(lead_key(id, id_bytes, round, split));
}

static struct begun_row *row_at(struct segment *segment, uint64_t key, uint32_t index,
                                uint32_t probe) {
    return &segment->begun[(mixed(key + index) + probe) % SHMBUS_BEGUN_ROWS];
}

static uint64_t owner_of(const struct begun_row *row) {
    /* SYNC: sample-begun. */
    return atomic_load_explicit(&row->owner, memory_order_acquire);
}

static uint32_t probes(void) {
    return PROBES < SHMBUS_BEGUN_ROWS ? PROBES : SHMBUS_BEGUN_ROWS;
}

static struct begun_row *find(struct segment *segment, uint64_t producer_id, uint64_t key,
                              uint32_t index) {
    for (uint32_t i = 0; i < probes(); i++) {
        struct begun_row *row = row_at(segment, key, index, i);
        if (owner_of(row) == (producer_id << 1 | WRITTEN) &&
            atomic_load_explicit(&row->key, memory_order_relaxed) == key &&
            atomic_load_explicit(&row->index, memory_order_relaxed) == index) {
            return row;
        }
    }
    return NULL;
}

enum begun_verdict begun_note(struct segment *segment, uint64_t producer_id, uint64_t key,
                              uint32_t index) {
    struct begun_row *known = find(segment, producer_id, key, index);
    if (known != NULL) {
        atomic_store_explicit(&known->begun_ns, clock_monotonic_ns(), memory_order_relaxed);
        return BEGUN_KNOWN;
    }
    for (uint32_t i = 0; i < probes(); i++) {
        struct begun_row *row = row_at(segment, key, index, i);
        uint64_t nobody = 0;
        if (owner_of(row) != 0 ||
            !atomic_compare_exchange_strong_explicit(&row->owner, &nobody, producer_id << 1,
                                                     memory_order_acq_rel, memory_order_relaxed)) {
            continue;
        }
        atomic_store_explicit(&row->key, key, memory_order_relaxed);
        atomic_store_explicit(&row->index, index, memory_order_relaxed);
        atomic_store_explicit(&row->begun_ns, clock_monotonic_ns(), memory_order_relaxed);
        /* SYNC: sample-begun. The rest of the row is in place. */
        atomic_store_explicit(&row->owner, producer_id << 1 | WRITTEN, memory_order_release);
        return BEGUN_NOTED;
    }
    return BEGUN_FULL;
}

bool begun_end(struct segment *segment, uint64_t producer_id, uint64_t key, uint32_t index) {
    struct begun_row *row = find(segment, producer_id, key, index);
    if (row == NULL) {
        return false;
    }
    atomic_store_explicit(&row->owner, 0, memory_order_release);
    return true;
}

void begun_forget(struct segment *segment, uint64_t producer_id) {
    for (uint32_t i = 0; i < SHMBUS_BEGUN_ROWS; i++) {
        uint64_t owner = atomic_load_explicit(&segment->begun[i].owner, memory_order_relaxed);
        if (owner >> 1 == producer_id && owner != 0) {
            atomic_compare_exchange_strong_explicit(&segment->begun[i].owner, &owner, 0,
                                                    memory_order_acq_rel, memory_order_relaxed);
        }
    }
}
