/* Counting what is delivered into the segment's histograms. Only the collector writes them. */
#ifndef SHMBUS_RING_FIGURES_H
#define SHMBUS_RING_FIGURES_H

#include "layout.h"

/* An upper bound of a bucket; they ascend, and a value belongs to the first that it does not exceed.
 * Versions, seconds, tokens, scores. */
double figure_bound(enum shmbus_figure figure, unsigned bucket);

/* A value that is not finite is not counted. */
void figure_count(struct delivery_figures *self, enum shmbus_figure figure, double value);

#endif
