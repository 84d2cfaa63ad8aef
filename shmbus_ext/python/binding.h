/* The only entry to Python and numpy, used only by files of this folder.
 *
 * Invariants: every object pointing into a segment holds a reference to its SegmentObject, and the
 * mapping goes away with the last object, whatever was closed before. Every entry point checks
 * fork_generation first: a child never uses its parent's slot, lock or cursor. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

#define PY_ARRAY_UNIQUE_SYMBOL shmbus_numpy_api
#ifndef SHMBUS_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <structmember.h>
#include <assert.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Interned names of attributes, arguments and fields. */
#define PY_WORDS(X)                                                                              \
    X(_take) X(advantages) X(close) X(failed) X(group_size) X(index) X(instance_id) X(key)       \
    X(leased) X(logprobs) X(loss_mask) X(max_groups) X(meta) X(nbytes) X(need) X(number)         \
    X(places) X(policy_version) X(round) X(row_lengths) X(rows) X(samples) X(score) X(size)      \
    X(split) X(timeout) X(tokens)
#define PY_OBJECT(name) PyObject *name;
extern struct py_words {
    PY_WORDS(PY_OBJECT)
} py_word;

/* Numbers and texts shared with Python; false with an exception. */
bool py_add_constants(PyObject *module);

/* Add an object; steals the reference. False with an exception, also for NULL. */
static inline bool py_add_object(PyObject *module, const char *name, PyObject *object) {
    bool added = object != NULL && PyModule_AddObjectRef(module, name, object) == 0;
    Py_XDECREF(object);
    return added;
}

/* A row of a method table; the function's type must match the flags. */
#define METHOD(name, function, flags, doc) \
    {name, (PyCFunction)(void (*)(void))(function), flags, doc}

/* First fields of every type of the core; `flags` extend the default flags. */
#define TYPE_BASICS(name, object, dealloc, flags)                           \
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core." name,      \
    .tp_basicsize = sizeof(object), .tp_dealloc = (destructor)(dealloc),    \
    .tp_flags = Py_TPFLAGS_DEFAULT | (flags)

/* For format K of Py_BuildValue. */
#define U64(value) ((unsigned long long)(value))

/* PyErr_Format with the result false. */
static inline bool py_refuse(PyObject *type, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    return false;
}

/* Return `result` with SystemError after an own mistake: an argument that no caller passes. */
#define NEVER(mistake, result)         \
    do {                               \
        if (mistake) {                 \
            PyErr_BadInternalCall();   \
            return result;             \
        }                              \
    } while (0)

/* Append an item to a list; steals the item. False with an exception, also for NULL. */
static inline bool py_append(PyObject *list, PyObject *item) {
    bool added = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return added;
}

/* Likewise, and clear the list on error. */
static inline void py_list_add(PyObject **list, PyObject *item) {
    if (!py_append(*list, item)) {
        Py_CLEAR(*list);
    }
}

/* Store an item in a new list or tuple, stealing the item; a NULL item clears the container. */
static inline void py_list_set(PyObject **list, Py_ssize_t at, PyObject *item) {
    if (item == NULL) {
        Py_CLEAR(*list);
    } else {
        PyList_SET_ITEM(*list, at, item);
    }
}
static inline void py_tuple_set(PyObject **tuple, Py_ssize_t at, PyObject *item) {
    if (item == NULL) {
        Py_CLEAR(*tuple);
    } else {
        PyTuple_SET_ITEM(*tuple, at, item);
    }
}

/* Put a key and its value into a dictionary, stealing both references; clear the dictionary on
 * error. */
static inline void py_dict_put(PyObject **dictionary, PyObject *key, PyObject *value) {
    if (key == NULL || value == NULL || PyDict_SetItem(*dictionary, key, value) < 0) {
        Py_CLEAR(*dictionary);
    }
    Py_XDECREF(key);
    Py_XDECREF(value);
}

/* Text of a fixed field, of at most PY_FIELD_BYTES: from a copy, as other processes may write a
 * shared row. */
#define PY_FIELD_BYTES 160
static inline PyObject *py_field_text(const char *field, size_t room) {
    char copy[PY_FIELD_BYTES];
    assert(room <= sizeof copy);
    memcpy(copy, field, room);
    const char *end = memchr(copy, 0, room);
    return PyUnicode_DecodeUTF8(copy, end == NULL ? (Py_ssize_t)room : end - copy, "replace");
}
#define FIELD_TEXT(field) py_field_text((field), sizeof(field))

/* In a setter: false with a TypeError for a deletion. */
static inline bool py_is_given(const PyObject *value, const char *name) {
    if (value == NULL) {
        PyErr_Format(PyExc_TypeError, "%s cannot be deleted", name);
    }
    return value != NULL;
}
