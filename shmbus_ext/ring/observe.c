/* What is noted for messages (see observe.h). First: samples that producers have begun. */
#include "ring/observe.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "ring/lead.h"

/* Rows looked at from a sample's own place on: nearly always one is free. */
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

/* ---- Counting what is delivered. */
/* One more than there are, which nothing exceeds: a search halves sixteen buckets. */
#define SEARCHED 15u
_Static_assert(SEARCHED == SHMBUS_FIGURE_BOUNDS + 1, "the search has four steps");

static const double bounds[SHMBUS_FIGURES][SEARCHED] = {
    [SHMBUS_FIGURE_LAG] = {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32, 64, 128, INFINITY},
    [SHMBUS_FIGURE_AGE] = {0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600,
                           INFINITY},
    [SHMBUS_FIGURE_LENGTH] = {64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536,
                              131072, 262144, 1048576, INFINITY},
    [SHMBUS_FIGURE_SCORE] = {-10, -1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10, 100,
                             INFINITY},
    /* Eighths, sixteenths near the ends; all samples are told from nearly all. */
    [SHMBUS_FIGURE_SOLVED] = {0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.8125,
                              0.875, 0.9375, 0.99999, 1, INFINITY},
};

double figure_bound(enum shmbus_figure figure, unsigned bucket) {
    return bounds[figure][bucket];
}

void figure_count(struct delivery_figures *self, enum shmbus_figure figure, double value) {
    /* 0 for all finite values. */
    if (value - value != 0) {
        return;
    }
    const double *own = bounds[figure];
    unsigned bucket = (unsigned)(value > own[7]) << 3;
    bucket += (unsigned)(value > own[bucket + 3]) << 2;
    bucket += (unsigned)(value > own[bucket + 1]) << 1;
    bucket += (unsigned)(value > own[bucket]);
    /* There is one writer, so a load and a store do. */
    struct figure_entry *to = &self->figures[figure];
    atomic_store_explicit(&to->buckets[bucket],
                          atomic_load_explicit(&to->buckets[bucket], memory_order_relaxed) + 1,
                          memory_order_relaxed);
    uint64_t bits = atomic_load_explicit(&to->sum, memory_order_relaxed);
    double total;
    memcpy(&total, &bits, sizeof total);
    total += value;
    memcpy(&bits, &total, sizeof bits);
    atomic_store_explicit(&to->sum, bits, memory_order_relaxed);
}

/* ---- Groups that ended early: a ring of hashes with a count. */
/* The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): each bit depends on each. */
static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94D049BB133111EB);
    return value ^ (value >> 31);
}

uint64_t group_key_hash(const char *id, uint32_t bytes, int64_t round, uint32_t split) {
    uint64_t hash = mix((uint64_t)round ^ mix(((uint64_t)split << 32) | bytes));
    for (uint32_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, id + at, bytes - at < 8 ? bytes - at : 8);
        hash = mix(hash ^ word);
    }
    return hash | 1;
}

void cancelled_add(struct segment *segment, uint64_t key_hash) {
    _Atomic uint64_t *count = &segment->header->cancelled_count;
    uint64_t before = atomic_load_explicit(count, memory_order_relaxed);
    atomic_store_explicit(&segment->cancelled[before % SHMBUS_CANCELLED], key_hash,
                          memory_order_relaxed);
    /* SYNC: group-cancelled. A count that is seen has its entries. */
    atomic_store_explicit(count, before + 1, memory_order_release);
}

bool cancelled_has(const struct segment *segment, uint64_t key_hash) {
    /* SYNC: group-cancelled. */
    uint64_t count =
        atomic_load_explicit(&segment->header->cancelled_count, memory_order_acquire);
    uint64_t entries = count < SHMBUS_CANCELLED ? count : SHMBUS_CANCELLED;
    uint64_t found = 0;
    for (uint64_t i = 0; i < entries; i++) {
        uint64_t entry = atomic_load_explicit(&segment->cancelled[i], memory_order_relaxed);
        found |= (uint64_t)(entry == key_hash);
    }
    return found != 0;
}
