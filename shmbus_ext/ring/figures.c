/* Counting what is delivered (see figures.h). */
#include "figures.h"

#include <math.h>
#include <string.h>

static const double bounds[SHMBUS_FIGURES][SHMBUS_FIGURE_BOUNDS] = {
    [SHMBUS_FIGURE_LAG] = {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32, 64, 128},
    [SHMBUS_FIGURE_AGE] = {0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600},
    [SHMBUS_FIGURE_LENGTH] = {64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536,
                              131072, 262144, 1048576},
    [SHMBUS_FIGURE_SCORE] = {-10, -1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10, 100},
};

double figure_bound(enum shmbus_figure figure, unsigned bucket) {
    return bounds[figure][bucket];
}

/* There is one writer, so a load and a store do. */
static void add_one(_Atomic uint64_t *count) {
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

static void add_to_sum(_Atomic uint64_t *sum, double value) {
    uint64_t bits = atomic_load_explicit(sum, memory_order_relaxed);
    double total;
    memcpy(&total, &bits, sizeof total);
    total += value;
    memcpy(&bits, &total, sizeof bits);
    atomic_store_explicit(sum, bits, memory_order_relaxed);
}

void figure_count(struct delivery_figures *self, enum shmbus_figure figure, double value) {
    if (!isfinite(value)) {
        return;
    }
    unsigned bucket = 0;
    for (unsigned i = 0; i < SHMBUS_FIGURE_BOUNDS; i++) {
        bucket += value > bounds[figure][i];
    }
    add_one(&self->figures[figure].buckets[bucket]);
    add_to_sum(&self->figures[figure].sum, value);
}
