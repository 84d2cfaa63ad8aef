/* Scores of samples relative to their groups, for trainers' advantages.
 *
 * Invariants:
 * - A group of one, and a group of equal scores up to SCORE_RESOLUTION, give 0. Finite scores never
 *   give NaN or infinity.
 * - Groups never touch: a group's result depends on its own scores alone, except for the kinds of
 *   the whole batch. */
#include "python/batch/batch.h"

#include <math.h>

/* Differences below this share of the larger score are rounding: 8 units of float32's last place,
 * for a reward that is the sum of a few float32 numbers. */
#define SCORE_RESOLUTION 0x1p-20

enum relative_kind {
    CENTRED,         /* score - mean */
    TO_OTHERS,       /* score - mean of the other samples */
    BY_DEVIATION,    /* centred, divided by the group's standard deviation */
    BY_ALL_DEVIATION /* centred, divided by the standard deviation of all scores */
};

/* Mean of some scores, and their largest distance from the mean; 0 for equal scores. */
struct spread {
    double mean, largest;
};

static struct spread spread_of(const double *scores, int64_t n) {
    double sum = 0, low = INFINITY, high = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        sum += scores[i];
        low = scores[i] < low ? scores[i] : low;
        high = scores[i] > high ? scores[i] : high;
    }
    const double mean = sum / (double)n;
    const bool level = high - low <= SCORE_RESOLUTION * fmax(fabs(low), fabs(high));
    return (struct spread){mean, level ? 0 : fmax(high - mean, mean - low)};
}

/* The divisor of centred scores in units of the largest distance, where no square can under- or
 * overflow: the standard deviation, by n - 1 or n, and eps. */
static double divisor_of(const double *scores, int64_t n, struct spread spread, bool by_n,
                         double eps) {
    if (spread.largest == 0) {
        return INFINITY;
    }
    double squares = 0;
    for (int64_t i = 0; i < n; i++) {
        const double distance = (scores[i] - spread.mean) / spread.largest;
        squares += distance * distance;
    }
    const int64_t count = by_n || n == 1 ? n : n - 1;
    return sqrt(squares / (double)count) + eps / spread.largest;
}

struct relation {
    enum relative_kind kind;
    bool by_n;
    double eps;
    struct spread all; /* of every group's scores */
    double all_divisor;
};

static void relate(const struct relation *by, double *out, const double *scores, int64_t n) {
    const struct spread spread = spread_of(scores, n);
    double factor = 1, unit = 1, divisor = 1;
    if (by->kind == TO_OTHERS) {
        factor = (double)n / (double)(n > 1 ? n - 1 : 1);
    } else if (by->kind == BY_DEVIATION) {
        unit = spread.largest;
        divisor = divisor_of(scores, n, spread, by->by_n, by->eps);
    } else if (by->kind == BY_ALL_DEVIATION) {
        unit = by->all.largest;
        divisor = by->all_divisor;
    }
    for (int64_t i = 0; i < n; i++) {
        /* A unit of 0 belongs to equal scores. */
        out[i] = spread.largest == 0 ? 0 : (scores[i] - spread.mean) * factor / unit / divisor;
    }
}

static bool check_sizes(const int64_t *sizes, npy_intp groups, npy_intp samples) {
    uint64_t left = (uint64_t)samples;
    for (npy_intp i = 0; i < groups; i++) {
        if (sizes[i] < 0 || (uint64_t)sizes[i] > left) {
            left = 1;
            break;
        }
        left -= (uint64_t)sizes[i];
    }
    return left == 0 || py_refuse(PyExc_ValueError, "sizes: expected %zd samples in all and none "
                                                    "below 0, got others; count the samples of "
                                                    "each group", (Py_ssize_t)samples);
}

/* relative_scores(scores float64 [S], sizes int64 [G], kind, by_n, eps) -> float64 [S]. */
static PyObject *py_relative_scores(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *given, *given_sizes;
    int kind, by_n;
    struct relation by;
    if (!PyArg_ParseTuple(args, "OOipd", &given, &given_sizes, &kind, &by_n, &by.eps)) {
        return NULL;
    }
    npy_intp count = (npy_intp)py_array_elements(given);
    const npy_intp groups = (npy_intp)py_array_elements(given_sizes);
    const double *scores;
    const int64_t *sizes;
    if (!py_check_array(given, "scores", NPY_FLOAT64, (uint64_t)count, false, &scores) ||
        !py_check_array(given_sizes, "sizes", NPY_INT64, (uint64_t)groups, false, &sizes) ||
        !check_sizes(sizes, groups, count)) {
        return NULL;
    }
    PyObject *result = PyArray_SimpleNew(1, &count, NPY_FLOAT64);
    if (result == NULL) {
        return NULL;
    }
    double *out = PyArray_DATA((PyArrayObject *)result);
    by.kind = (enum relative_kind)kind;
    by.by_n = by_n != 0;
    by.all = spread_of(scores, count);
    by.all_divisor = divisor_of(scores, count, by.all, by.by_n, by.eps);
    for (npy_intp i = 0; i < groups; i++) {
        relate(&by, out, scores, sizes[i]);
        out += sizes[i];
        scores += sizes[i];
    }
    return result;
}

PyMethodDef py_advantages_functions[] = {
    {"relative_scores", py_relative_scores, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct named_value py_advantages_constants[] = {
    {"CENTRED", CENTRED},
    {"TO_OTHERS", TO_OTHERS},
    {"BY_DEVIATION", BY_DEVIATION},
    {"BY_ALL_DEVIATION", BY_ALL_DEVIATION},
    {NULL, 0},
};

bool py_advantages_add_objects(PyObject *module) {
    return py_add_object(module, "SCORE_RESOLUTION", PyFloat_FromDouble(SCORE_RESOLUTION));
}
