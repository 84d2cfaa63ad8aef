/* Delivery figures, groups that ended early, samples released unmade (see observe.h). */
#include "ring/observe.h"

/* ---- Counting deliveries. */
/* One above the number of bounds, filled with infinity: a binary search over sixteen buckets. */
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
    /* Eighths, sixteenths near the ends, to separate fully solved from almost fully solved. */
    [SHMBUS_FIGURE_SOLVED] = {0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.8125,
                              0.875, 0.9375, 0.99999, 1, INFINITY},
};

double figure_bound(enum shmbus_figure figure, unsigned bucket) {
    return bounds[figure][bucket];
}

void figure_count(struct delivery_figures *self, enum shmbus_figure figure, double value) {
    /* 0 for every finite value. */
    if (value - value != 0) {
        return;
    }
    const double *own = bounds[figure];
    unsigned bucket = (unsigned)(value > own[7]) << 3;
    bucket += (unsigned)(value > own[bucket + 3]) << 2;
    bucket += (unsigned)(value > own[bucket + 1]) << 1;
    bucket += (unsigned)(value > own[bucket]);
    /* A single writer: a load and a store suffice. */
    struct figure_entry *to = &self->figures[figure];
    SET_RELAXED(to->buckets[bucket], RELAXED(to->buckets[bucket]) + 1);
    uint64_t bits = RELAXED(to->sum);
    double total;
    memcpy(&total, &bits, sizeof total);
    total += value;
    memcpy(&bits, &total, sizeof bits);
    SET_RELAXED(to->sum, bits);
}

/* ---- Groups that ended early: a ring of hashes with a count. */
/* The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every
 * input bit. */
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
    uint64_t before = RELAXED(*count);
    SET_RELAXED(segment->cancelled[before % SHMBUS_CANCELLED], key_hash);
    /* SYNC: group-cancelled. A visible count covers visible entries. */
    SET_RELEASE(*count, before + 1);
}

bool cancelled_has(const struct segment *segment, uint64_t key_hash) {
    /* SYNC: group-cancelled. */
    uint64_t count = ACQUIRE(segment->header->cancelled_count);
    uint64_t entries = count < SHMBUS_CANCELLED ? count : SHMBUS_CANCELLED;
    uint64_t found = 0;
    for (uint64_t i = 0; i < entries; i++) {
        uint64_t entry = RELAXED(segment->cancelled[i]);
        found |= (uint64_t)(entry == key_hash);
    }
    return found != 0;
}

void unmade_note(struct segment *segment, uint32_t slot, uint32_t released,
                 const struct unmade *note) {
    struct wait_row *row = &segment->waits[slot];
    atomic_fetch_add_explicit(&row->released, released, memory_order_relaxed);
    SET_RELAXED(row->given_back, note->given_back);
    SET_RELAXED(row->failed, note->failed);
    SET_RELAXED(row->rests_until_ns, note->rests_until_ns);
    for (uint32_t i = 0; i < SHMBUS_UNMADE_WORDS; i++) {
        uint64_t word;
        memcpy(&word, note->reason + i * sizeof word, sizeof word);
        SET_RELAXED(row->reason[i], word);
    }
}
