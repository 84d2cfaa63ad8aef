/* Delivery figures in the segment: histograms, and a count of useless groups.
 *
 * Invariant: every histogram keeps a fixed number of buckets. */
#pragma once

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Values counted at the first delivery of a group: age of the group, solved share of its samples,
 * and for every sample policy lag, tokens and score. */
enum shmbus_figure {
    SHMBUS_FIGURE_LAG = 0,
    SHMBUS_FIGURE_AGE = 1,
    SHMBUS_FIGURE_LENGTH = 2,
    SHMBUS_FIGURE_SCORE = 3,
    SHMBUS_FIGURE_SOLVED = 4,
    SHMBUS_FIGURES = 5,
};

/* Upper bounds of a histogram's buckets; one more bucket takes the rest. Two cache lines. */
#define SHMBUS_FIGURE_BOUNDS 14u
#define SHMBUS_FIGURE_BUCKETS (SHMBUS_FIGURE_BOUNDS + 1u)

/* Offset  Size  Field    Written by  Read by  Order
 *      0   120  buckets  collector   anyone   relaxed, for messages only
 *    120     8  sum      collector   anyone   relaxed: the bits of a double
 */
struct figure_entry {
    alignas(64) _Atomic uint64_t buckets[SHMBUS_FIGURE_BUCKETS];
    _Atomic uint64_t sum;
};
_Static_assert(sizeof(struct figure_entry) == 128, "two cache lines a figure");
_Static_assert(offsetof(struct figure_entry, sum) == 120, "layout");

/* A sample with at least this score counts as solved, for tasks with 0 and 1 or with -1 and 1. */
#define SHMBUS_SOLVED_SCORE 0.5

/* Offset  Size  Field           Written by  Read by  Order
 *      0   640  figures         collector   anyone   as above
 *    640     8  groups_dropped  collector   anyone   relaxed: refused by a filter, or no variance
 */
struct delivery_figures {
    struct figure_entry figures[SHMBUS_FIGURES];
    alignas(64) _Atomic uint64_t groups_dropped;
};
_Static_assert(sizeof(struct delivery_figures) == 704, "layout");
_Static_assert(offsetof(struct delivery_figures, groups_dropped) == 640, "layout");
