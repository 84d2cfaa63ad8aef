/* How far each score of a group lies from its siblings', in one pass over a group in cache.
 *
 * Invariants: float64 inside; equal scores, and one alone, give exactly 0; scores up to
 * BASELINE_MAX_SCORE by magnitude never give a nan or an infinity. */
#ifndef SHMBUS_BATCH_BASELINE_H
#define SHMBUS_BATCH_BASELINE_H

#include <stdbool.h>
#include <stdint.h>

/* The difference of two such is still finite in float32. */
#define BASELINE_MAX_SCORE 1e38

enum relative_kind {
    BASELINE_MEAN = 0,  /* score - mean */
    BASELINE_LEAVE_ONE_OUT,    /* score - mean of the others */
    BASELINE_DEVIATION, /* (score - mean) / (standard deviation + eps) */
    RELATIVE_KINDS,
};

struct baseline {
    enum relative_kind kind;
    bool bessel; /* the squares are divided by n - 1, not by n */
    double eps;
};

/* Whether all are numbers up to BASELINE_MAX_SCORE; false for a nan. */
bool relative_fits(const double *scores, uint64_t n);

/* One group; scores that do not fit give anything. */
void relative_scores(const double *scores, uint64_t n, const struct baseline *rule,
                     double *out);

#endif
