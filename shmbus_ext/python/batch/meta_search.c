/* Which trajectories mention a word in their encoded meta, without decoding it: apart from the
 * lookup of fields, since it reads bytes that no schema describes.
 *
 * Invariant: only trajectories that are readable are looked into; nothing is copied or held. */
#define _GNU_SOURCE /* memmem */
#include "python/batch/meta_search.h"

#include <string.h>

bool py_meta_mentions(const TrajectoryObject *t, PyObject *words) {
    const uint8_t *meta = NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(words); i++) {
        PyObject *word = PyTuple_GET_ITEM(words, i);
        if ((size_t)t->meta_bytes < (size_t)PyBytes_GET_SIZE(word)) {
            continue;
        }
        meta = meta == NULL ? py_trajectory_bytes(t) + t->meta_offset : meta;
        if (memmem(meta, t->meta_bytes, PyBytes_AS_STRING(word),
                   (size_t)PyBytes_GET_SIZE(word)) != NULL) {
            return true;
        }
    }
    return false;
}

bool py_append_number(PyObject *list, Py_ssize_t number) {
    PyObject *item = PyLong_FromSsize_t(number);
    bool appended = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return appended;
}

bool py_check_words(PyObject *words) {
    bool good = PyTuple_Check(words);
    for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(words); i++) {
        good = PyBytes_Check(PyTuple_GET_ITEM(words, i));
    }
    if (!good) {
        PyErr_Format(PyExc_TypeError, "words: expected a tuple of bytes, got %R", words);
    }
    return good;
}

static bool append_if_mentioned(PyObject *found, Py_ssize_t position, PyObject *item,
                                PyObject *words) {
    return !py_meta_mentions((const TrajectoryObject *)item, words) ||
           py_append_number(found, position);
}

/* mentioning(trajectories, words) -> positions of those whose encoded meta contains one of them. */
static PyObject *py_mentioning(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items, *words;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &items, &words) || !py_check_words(words)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                         Py_TYPE(item)->tp_name);
            Py_CLEAR(found);
        } else if (((const TrajectoryObject *)item)->meta_bytes > 0 &&
                   (!py_trajectory_readable((const TrajectoryObject *)item) ||
                    !append_if_mentioned(found, i, item, words))) {
            Py_CLEAR(found);
        }
    }
    return found;
}

static PyMethodDef functions[] = {
    {"mentioning", py_mentioning, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_meta_search_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
