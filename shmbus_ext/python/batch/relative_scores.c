/* Scores relative to their group, for batch/scores.py.
 *
 * Invariant: equal scores, and a single score, give exactly 0 and a deviation of 1. */
#include "python/batch/batch.h"

/* Store n scores minus their mean; return their standard deviation plus eps. */
static double subtract_mean(const double *scores, uint64_t n, bool by_n, double eps, double *out) {
    double sum = 0, lowest = INFINITY, highest = -INFINITY;
    for (uint64_t i = 0; i < n; i++) {
        sum += scores[i];
        lowest = fmin(lowest, scores[i]);
        highest = fmax(highest, scores[i]);
    }
    if (highest - lowest <= SCORE_RESOLUTION * fmax(fabs(lowest), fabs(highest))) {
        memset(out, 0, n * sizeof *out);
        return 1;
    }
    const double mean = sum / (double)n, unit = fmax(highest - mean, mean - lowest);
    double squares = 0;
    for (uint64_t i = 0; i < n; i++) {
        out[i] = scores[i] - mean;
        /* In units of the largest distance no square under- or overflows. */
        squares += (out[i] / unit) * (out[i] / unit);
    }
    return unit * (sqrt(squares / (double)(by_n ? n : n - 1)) + eps / unit);
}

/* (scores float64 [S], sizes int64 [G], deviation, by_n, eps) -> float64 [S]: the scores minus the
 * mean of their group, divided by a standard deviation (by n or n - 1) plus eps. */
static PyObject *py_relative_scores(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *given, *given_sizes;
    const double *scores;
    const int64_t *sizes;
    int divisor, by_n;
    double eps;
    if (!PyArg_ParseTuple(args, "OOipd", &given, &given_sizes, &divisor, &by_n, &eps)) {
        return NULL;
    }
    const uint64_t samples = py_array_elements(given), groups = py_array_elements(given_sizes);
    if (!py_check_array(given, "scores", NPY_FLOAT64, samples, false, &scores) ||
        !py_check_array(given_sizes, "sizes", NPY_INT64, groups, false, &sizes)) {
        return NULL;
    }
    npy_intp length = (npy_intp)samples;
    PyObject *result = PyArray_ZEROS(1, &length, NPY_FLOAT64, 0);
    if (result == NULL) {
        return NULL;
    }
    double *out = PyArray_DATA((PyArrayObject *)result), deviation = 1;
    if (divisor == DEVIATION_OF_ALL) {
        deviation = subtract_mean(scores, samples, by_n != 0, eps, out);
    }
    uint64_t at = 0;
    for (uint64_t i = 0; i < groups && (uint64_t)sizes[i] <= samples - at; i++) {
        const uint64_t n = (uint64_t)sizes[i];
        const double own = subtract_mean(scores + at, n, by_n != 0, eps, out + at);
        for (const uint64_t end = at + n; at < end; at++) {
            out[at] /= divisor == DEVIATION_OF_GROUP ? own : deviation;
        }
    }
    NEVER(at != samples, NULL);
    return result;
}

PyMethodDef py_scores_functions[] = {
    {"relative_scores", py_relative_scores, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
