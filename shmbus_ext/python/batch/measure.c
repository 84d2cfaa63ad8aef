/* What trajectories have, before a batch is made of them: checked, counted, described.
 *
 * Invariant: nothing here copies payload, nor holds it. */
#include "python/batch/measure.h"

#include "batch/baseline.h"
#include "python/batch/arrays.h"
#include "python/batch/field_lookup.h"
#include "python/record/score.h"

/* measure(trajectories, names) -> (tokens of each, fields that one has, fields that one lacks, names
 * of all fields of each schema that was met, whether all scores can be compared), after the checks
 * that pack makes. */
static PyObject *py_measure(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items, *names[FIELDS];
    if (!PyArg_ParseTuple(args, "O!(OOOO)", &PyList_Type, &items, &names[0], &names[1], &names[2],
                          &names[3])) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(items);
    struct source *sources = PyMem_Malloc((size_t)(count + 1) * sizeof *sources);
    if (sources == NULL) {
        return PyErr_NoMemory();
    }
    struct lookup lookup = {.schema = NULL, .field_names = PyList_New(0)};
    PyObject *lengths = lookup.field_names != NULL &&
                                py_find_sources(&lookup, items, names, sources)
                            ? PyList_New(count)
                            : NULL;
    bool scores_fit = true;
    for (Py_ssize_t i = 0; lengths != NULL && i < count; i++) {
        scores_fit &= baseline_scores_fit(&sources[i].trajectory->score, 1);
        PyObject *length = PyLong_FromUnsignedLongLong(sources[i].length);
        if (length == NULL) {
            Py_CLEAR(lengths);
        } else {
            PyList_SET_ITEM(lengths, i, length);
        }
    }
    PyMem_Free(sources);
    PyObject *result = lengths == NULL ? NULL
                                       : Py_BuildValue("OiiOO", lengths, lookup.has, lookup.lacks,
                                                       lookup.field_names,
                                                       scores_fit ? Py_True : Py_False);
    Py_XDECREF(lengths);
    Py_XDECREF(lookup.field_names);
    return result;
}

/* One element of an array that this file has just made. */
#define ELEMENT(array, type, i) (((type *)PyArray_DATA((PyArrayObject *)(array)))[i])

/* describe(trajectories) -> (scores float64 [S], policy_versions int64 [S], instance_ids,
 * newest_policy_versions int64 [S]). */
static PyObject *py_describe(PyObject *module, PyObject *items) {
    (void)module;
    if (!PyList_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "describe: expected a list of trajectories");
        return NULL;
    }
    npy_intp count = PyList_GET_SIZE(items);
    PyObject *scores = PyArray_SimpleNew(1, &count, NPY_FLOAT64);
    PyObject *versions = PyArray_SimpleNew(1, &count, NPY_INT64);
    PyObject *newest = PyArray_SimpleNew(1, &count, NPY_INT64);
    PyObject *ids = PyList_New(count);
    bool good = scores != NULL && versions != NULL && newest != NULL && ids != NULL;
    for (npy_intp i = 0; good && i < count; i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                         Py_TYPE(item)->tp_name);
            good = false;
            break;
        }
        const TrajectoryObject *t = (const TrajectoryObject *)item;
        if (isnan(t->score) && !py_trajectory_require_score(t)) {
            good = false;
            break;
        }
        ELEMENT(scores, double, i) = t->score;
        ELEMENT(versions, int64_t, i) = t->policy_version;
        ELEMENT(newest, int64_t, i) = t->policy_version + (int64_t)t->version_span;
        PyList_SET_ITEM(ids, i, Py_NewRef(t->instance_id));
    }
    PyObject *result = good ? PyTuple_Pack(4, scores, versions, ids, newest) : NULL;
    Py_XDECREF(scores);
    Py_XDECREF(versions);
    Py_XDECREF(newest);
    Py_XDECREF(ids);
    return result;
}

static PyMethodDef functions[] = {
    {"describe", py_describe, METH_O, NULL},
    {"measure", py_measure, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_measure_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0 &&
           PyModule_AddIntConstant(module, "HAS_LOGPROBS", 1 << FIELD_LOGPROBS) == 0;
}
