/* Counting what is delivered into the segment's histograms. Only the collector writes them. */
#ifndef SHMBUS_RING_FIGURES_H
#define SHMBUS_RING_FIGURES_H

#include <stdbool.h>

#include "layout.h"

/* What one call counts, before it is added to the segment: taking samples is the hot path, and most
 * values fall into the same few buckets. A call is often about one group, and looks only at buckets
 * that it has touched. */
struct figure_tally {
    uint64_t buckets[SHMBUS_FIGURES][SHMBUS_FIGURE_BUCKETS];
    double sums[SHMBUS_FIGURES];
    /* The last value of each figure and its bucket: siblings mostly have equal ones. */
    double last[SHMBUS_FIGURES];
    uint32_t touched[SHMBUS_FIGURES]; /* a bit a bucket */
    uint8_t at[SHMBUS_FIGURES];
};
_Static_assert(SHMBUS_FIGURE_BUCKETS <= 32, "touched has a bit for each bucket");

/* An upper bound of a bucket; they ascend, and a value belongs to the first that it does not exceed.
 * Versions, seconds, tokens, scores. */
double figure_bound(enum shmbus_figure figure, unsigned bucket);

void figure_tally_begin(struct figure_tally *tally);

/* Makes it the last value; false if it is not finite. */
bool figure_find_bucket(struct figure_tally *tally, enum shmbus_figure figure, double value);

/* A value that is not finite is not counted. */
static inline void figure_count(struct figure_tally *tally, enum shmbus_figure figure,
                                double value) {
    if (value == tally->last[figure] || figure_find_bucket(tally, figure, value)) {
        tally->buckets[figure][tally->at[figure]]++;
        tally->sums[figure] += value;
    }
}

void figures_add(struct delivery_figures *self, const struct figure_tally *tally);

#endif
