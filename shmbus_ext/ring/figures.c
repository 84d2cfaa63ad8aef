/* Counting what is delivered (see figures.h). */
#include "figures.h"

#include <math.h>
#include <string.h>

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

void figure_tally_begin(struct figure_tally *tally) {
    memset(tally, 0, sizeof *tally);
    for (int f = 0; f < SHMBUS_FIGURES; f++) {
        tally->last[f] = NAN; /* which no value equals */
    }
}

bool figure_find_bucket(struct figure_tally *tally, enum shmbus_figure figure, double value) {
    /* 0 for all finite values. */
    if (value - value != 0) {
        return false;
    }
    const double *own = bounds[figure];
    unsigned bucket = (unsigned)(value > own[7]) << 3;
    bucket += (unsigned)(value > own[bucket + 3]) << 2;
    bucket += (unsigned)(value > own[bucket + 1]) << 1;
    bucket += (unsigned)(value > own[bucket]);
    tally->touched[figure] |= UINT32_C(1) << bucket;
    tally->last[figure] = value;
    tally->at[figure] = (uint8_t)bucket;
    return true;
}

/* There is one writer, so a load and a store do. */
static void add_count(_Atomic uint64_t *count, uint64_t more) {
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + more,
                          memory_order_relaxed);
}

static void add_to_sum(_Atomic uint64_t *sum, double more) {
    uint64_t bits = atomic_load_explicit(sum, memory_order_relaxed);
    double total;
    memcpy(&total, &bits, sizeof total);
    total += more;
    memcpy(&bits, &total, sizeof bits);
    atomic_store_explicit(sum, bits, memory_order_relaxed);
}

void figures_add(struct delivery_figures *self, const struct figure_tally *tally) {
    for (int f = 0; f < SHMBUS_FIGURES; f++) {
        for (uint32_t left = tally->touched[f]; left != 0; left &= left - 1) {
            const int bucket = __builtin_ctz(left);
            add_count(&self->figures[f].buckets[bucket], tally->buckets[f][bucket]);
        }
        if (tally->touched[f] != 0) {
            add_to_sum(&self->figures[f].sum, tally->sums[f]);
        }
    }
}
