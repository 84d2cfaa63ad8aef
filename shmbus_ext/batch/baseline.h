/* Scores relative to a baseline of their group (mean, leave-one-out, deviation), in one pass.
 *
 * Invariants: float64 inside; equal scores, and a single one, give exactly 0; scores up to
 * BASELINE_MAX_SCORE by magnitude never give a nan or an infinity. */
#ifndef SHMBUS_BATCH_BASELINE_H
#define SHMBUS_BATCH_BASELINE_H

#include <stdbool.h>
#include <stdint.h>

/* The difference of two such is still finite in float32. */
#define BASELINE_MAX_SCORE 1e38

enum baseline_kind {
    BASELINE_MEAN = 0,      /* score - mean */
    BASELINE_LEAVE_ONE_OUT, /* score - mean of the others */
    BASELINE_DEVIATION,     /* (score - mean) / (standard deviation + eps) */
    BASELINE_KINDS,
};

struct baseline {
    enum baseline_kind kind;
    bool bessel; /* the squares are divided by n - 1, not by n */
    double eps;
};

/* Whether all are numbers up to BASELINE_MAX_SCORE; false for a nan. */
bool baseline_scores_fit(const double *scores, uint64_t n);

/* Applies the baseline to the n scores of one group. Scores that do not fit give any result. */
void baseline_apply(const double *scores, uint64_t n, const struct baseline *baseline,
                     double *out);

#endif
