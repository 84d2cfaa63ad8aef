/* The loops of batch/baseline.h. */
#include "baseline.h"

#include <math.h>
#include <string.h>

bool baseline_scores_fit(const double *scores, uint64_t n) {
    bool fits = true;
    for (uint64_t i = 0; i < n; i++) {
        /* A nan compares with nothing. */
        fits &= fabs(scores[i]) <= BASELINE_MAX_SCORE;
    }
    return fits;
}

static void standardise(double *centred, uint64_t n, const struct baseline *baseline,
                        double unit) {
    /* In units of the largest deviation no square can under- or overflow. */
    for (uint64_t i = 0; i < n; i++) {
        centred[i] /= unit;
    }
    double squares = 0;
    for (uint64_t i = 0; i < n; i++) {
        squares += centred[i] * centred[i];
    }
    double scale = sqrt(squares / (double)(baseline->bessel ? n - 1 : n)) + baseline->eps / unit;
    for (uint64_t i = 0; i < n; i++) {
        centred[i] /= scale;
    }
}

void baseline_apply(const double *scores, uint64_t n, const struct baseline *baseline,
                     double *out) {
    double sum = 0, lowest = INFINITY, highest = -INFINITY;
    for (uint64_t i = 0; i < n; i++) {
        sum += scores[i];
        lowest = scores[i] < lowest ? scores[i] : lowest;
        highest = scores[i] > highest ? scores[i] : highest;
    }
    /* By comparison, since the mean of equal scores may differ from them by a rounding. */
    bool level = !(lowest < highest);
    double mean = sum / (double)n;
    if (level) {
        memset(out, 0, n * sizeof *out);
        return;
    }
    /* score - mean of others = (score - mean) * n / (n - 1) */
    double factor = baseline->kind == BASELINE_LEAVE_ONE_OUT ? (double)n / (double)(n - 1) : 1.0;
    for (uint64_t i = 0; i < n; i++) {
        out[i] = (scores[i] - mean) * factor;
    }
    if (baseline->kind == BASELINE_DEVIATION) {
        double above = highest - mean, below = mean - lowest;
        standardise(out, n, baseline, above > below ? above : below);
    }
}
