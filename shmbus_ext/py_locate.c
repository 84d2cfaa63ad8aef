/* For who reads records by other means than the gather here: a table of where their fields lie,
 * and looks at bytes that would be slow from Python.
 *
 * Invariant: nothing here copies a payload or holds space: addresses are good for as long as the
 * trajectories are leased, and who uses them sees to that. */
#define _GNU_SOURCE /* memmem */
#include "py_sources.h"

#include <string.h>

/* Columns of a row: where each field begins (bytes from the segment's base, -1 for none), the kind
 * of each (enum element_kind), and the tokens. */
enum { COLUMN_KINDS = FIELDS, COLUMN_LENGTH = 2 * FIELDS, COLUMNS };

static void fill_row(int64_t *row, const struct source *source, const uint8_t *base) {
    for (int f = 0; f < FIELDS; f++) {
        const uint8_t *at = source->data[f];
        row[f] = at == NULL ? -1 : (int64_t)(at - base);
        row[COLUMN_KINDS + f] = at == NULL ? -1 : source->kinds[f];
    }
    row[COLUMN_LENGTH] = (int64_t)source->length;
}

/* locate(trajectories, names) -> (base, bytes, table int64 [S, 9]). */
static PyObject *locate(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items, *names[FIELDS];
    if (!PyArg_ParseTuple(args, "O!(OOOO)", &PyList_Type, &items, &names[0], &names[1], &names[2],
                          &names[3])) {
        return NULL;
    }
    npy_intp shape[2] = {PyList_GET_SIZE(items), COLUMNS};
    if (shape[0] == 0) {
        PyErr_SetString(PyExc_ValueError, "locate: expected at least one trajectory, got none");
        return NULL;
    }
    struct source *sources = PyMem_Malloc((size_t)shape[0] * sizeof *sources);
    if (sources == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *table = find_sources(items, names, sources) ? PyArray_SimpleNew(2, shape, NPY_INT64)
                                                          : NULL;
    const SegmentObject *segment = table == NULL ? NULL : sources[0].trajectory->reader->segment;
    for (npy_intp i = 0; table != NULL && i < shape[0]; i++) {
        if (sources[i].trajectory->reader->segment != segment) {
            PyErr_SetString(PyExc_ValueError,
                            "locate: expected trajectories of one Consumer, got several's");
            Py_CLEAR(table);
            break;
        }
        fill_row((int64_t *)PyArray_DATA((PyArrayObject *)table) + i * COLUMNS, &sources[i],
                 segment->c.base);
    }
    PyMem_Free(sources);
    return table == NULL ? NULL
                         : Py_BuildValue("KKN", (unsigned long long)(uintptr_t)segment->c.base,
                                         (unsigned long long)segment->c.bytes, table);
}

/* find_not_finite(array float32 [n]) -> position of the first nan or infinity, or -1. */
static PyObject *find_not_finite(PyObject *module, PyObject *object) {
    (void)module;
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_TYPE(array) != NPY_FLOAT32 ||
        PyArray_NDIM(array) != 1 || !PyArray_IS_C_CONTIGUOUS(array)) {
        PyErr_SetString(PyExc_TypeError,
                        "find_not_finite: expected a contiguous float32 array of one dimension");
        return NULL;
    }
    npy_intp n = PyArray_SIZE(array);
    const float *values = PyArray_DATA(array);
    uint64_t at;
    Py_BEGIN_ALLOW_THREADS
    at = gather_find_not_finite(values, (uint64_t)n);
    Py_END_ALLOW_THREADS
    return PyLong_FromSsize_t(at < (uint64_t)n ? (npy_intp)at : -1);
}

/* mentioning(trajectories, word) -> positions of those whose encoded meta contains these bytes. */
static PyObject *mentioning(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items;
    const char *word;
    Py_ssize_t word_bytes;
    if (!PyArg_ParseTuple(args, "O!y#", &PyList_Type, &items, &word, &word_bytes)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                         Py_TYPE(item)->tp_name);
            Py_CLEAR(found);
            break;
        }
        const TrajectoryObject *t = (const TrajectoryObject *)item;
        if (t->meta_bytes < (uint32_t)word_bytes) {
            continue;
        }
        if (!trajectory_readable(t)) {
            Py_CLEAR(found);
            break;
        }
        if (memmem(trajectory_bytes(t) + t->meta_offset, t->meta_bytes, word,
                   (size_t)word_bytes) != NULL) {
            PyObject *position = PyLong_FromSsize_t(i);
            if (position == NULL || PyList_Append(found, position) < 0) {
                Py_CLEAR(found);
            }
            Py_XDECREF(position);
        }
    }
    return found;
}

static PyMethodDef functions[] = {
    {"locate", locate, METH_VARARGS, NULL},
    {"find_not_finite", find_not_finite, METH_O, NULL},
    {"mentioning", mentioning, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* What a kind in the table is to numpy, by its number. */
static PyObject *kind_names(void) {
    return Py_BuildValue("(sssssssssss)", "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4",
                         "f8");
}
_Static_assert(ELEMENT_BOOL == 0 && ELEMENT_U64 == 8 && ELEMENT_F32 == 9 && ELEMENT_F64 == 10,
               "kind_names has them in this order");

bool locate_add_functions(PyObject *module) {
    PyObject *names = kind_names();
    bool added = names != NULL && PyModule_AddObjectRef(module, "ELEMENT_KINDS", names) == 0;
    Py_XDECREF(names);
    return added && PyModule_AddFunctions(module, functions) == 0;
}
