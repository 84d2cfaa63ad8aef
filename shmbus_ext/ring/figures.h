/* Counting what is delivered into the segment's histograms. Only the collector writes them. */
#ifndef SHMBUS_RING_FIGURES_H
#define SHMBUS_RING_FIGURES_H

#include "layout.h"

/* What one call counts, before it is added to the segment: taking samples is the hot path, and most
 * values fall into the same few buckets. All zeros at first. */
struct figure_tally {
    uint64_t buckets[SHMBUS_FIGURES][SHMBUS_FIGURE_BUCKETS];
    double sums[SHMBUS_FIGURES];
};

/* An upper bound of a bucket; they ascend, and a value belongs to the first that it does not exceed.
 * Versions, seconds, tokens, scores. */
double figure_bound(enum shmbus_figure figure, unsigned bucket);

/* A value that is not finite is not counted. */
void figure_count(struct figure_tally *tally, enum shmbus_figure figure, double value);

void figures_add(struct delivery_figures *self, const struct figure_tally *tally);

#endif
