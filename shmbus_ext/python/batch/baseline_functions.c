/* batch/baseline.c for Python: rules as they come from there, and whole batches of groups.
 *
 * Invariant: sizes are checked against the scores before anything is read by them. */
#include "python/batch/batch.h"


bool py_baseline_of_tuple(PyObject *tuple, struct baseline *rule) {
    int kind, bessel;
    if (!PyArg_ParseTuple(tuple, "ipd", &kind, &bessel, &rule->eps)) {
        return false;
    }
    if (kind < 0 || kind >= BASELINE_KINDS) {
        return py_refuse(PyExc_ValueError, "kind: expected 0 to %d, got %d", BASELINE_KINDS - 1,
                         kind);
    }
    rule->kind = (enum baseline_kind)kind;
    rule->bessel = bessel != 0;
    return true;
}

static bool sizes_fit(const int64_t *sizes, uint64_t groups, uint64_t samples) {
    for (uint64_t i = 0; i < groups; i++) {
        if (sizes[i] < 0 || (uint64_t)sizes[i] > samples) {
            return false;
        }
        samples -= (uint64_t)sizes[i];
    }
    return samples == 0;
}

/* relative_scores(scores float64 [S], sizes int64 [G], (kind, bessel, eps)) -> float64 [S], or None
 * where scores or sizes do not fit. */
static PyObject *py_relative_scores(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *arrays[2], *tuple;
    struct baseline rule;
    const double *scores;
    const int64_t *sizes;
    if (!PyArg_ParseTuple(args, "OOO!", &arrays[0], &arrays[1], &PyTuple_Type, &tuple) ||
        !py_baseline_of_tuple(tuple, &rule)) {
        return NULL;
    }
    uint64_t samples = py_array_elements(arrays[0]), groups = py_array_elements(arrays[1]);
    if (!py_check_array(arrays[0], "scores", NPY_FLOAT64, samples, false, &scores) ||
        !py_check_array(arrays[1], "sizes", NPY_INT64, groups, false, &sizes)) {
        return NULL;
    }
    if (!sizes_fit(sizes, groups, samples) || !baseline_scores_fit(scores, samples)) {
        Py_RETURN_NONE;
    }
    npy_intp length = (npy_intp)samples;
    PyObject *result = PyArray_SimpleNew(1, &length, NPY_FLOAT64);
    if (result != NULL) {
        double *out = PyArray_DATA((PyArrayObject *)result);
        for (uint64_t i = 0, at = 0; i < groups; at += (uint64_t)sizes[i++]) {
            baseline_apply(scores + at, (uint64_t)sizes[i], &rule, out + at);
        }
    }
    return result;
}

PyMethodDef py_baseline_functions[] = {
    {"relative_scores", py_relative_scores, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct named_value py_baseline_constants[] = {
    {"BASELINE_MEAN", BASELINE_MEAN},
    {"BASELINE_LEAVE_ONE_OUT", BASELINE_LEAVE_ONE_OUT},
    {"BASELINE_DEVIATION", BASELINE_DEVIATION},
    {NULL, 0},
};

bool py_baseline_add_objects(PyObject *module) {
    return py_add_object(module, "BASELINE_MAX_SCORE", PyFloat_FromDouble(BASELINE_MAX_SCORE));
}
