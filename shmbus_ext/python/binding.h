/* The one door to Python and numpy: only the files of this folder come through it.
 *
 * Invariants: every object that points into a segment holds a reference to its SegmentObject, and
 * the mapping goes away with the last of them, whatever was closed before. Every entry point looks
 * at fork_generation first: a child never uses its parent's slot, lock or cursor. */
#ifndef SHMBUS_PYTHON_BINDING_H
#define SHMBUS_PYTHON_BINDING_H

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
#include <stdbool.h>
#include <stdint.h>

/* A text that Python code looks up again and again, and where it is kept. */
struct word_note {
    PyObject **at;
    const char *text;
};
static inline bool py_intern_words(const struct word_note *words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        *words[i].at = PyUnicode_InternFromString(words[i].text);
        if (*words[i].at == NULL) {
            return false;
        }
    }
    return true;
}
#define INTERN_WORDS(words) py_intern_words(words, sizeof(words) / sizeof *(words))

/* What Python knows of the core's numbers. */
struct named_value {
    const char *name;
    long value;
};
static inline bool py_add_constants(PyObject *module, const struct named_value *values,
                                    size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (PyModule_AddIntConstant(module, values[i].name, values[i].value) < 0) {
            return false;
        }
    }
    return true;
}
#define ADD_CONSTANTS(module, values) \
    py_add_constants(module, values, sizeof(values) / sizeof *(values))

/* In a setter: false with a TypeError where the attribute was to be deleted. */
static inline bool py_is_given(const PyObject *value, const char *name) {
    if (value == NULL) {
        PyErr_Format(PyExc_TypeError, "%s cannot be deleted", name);
    }
    return value != NULL;
}

#endif
