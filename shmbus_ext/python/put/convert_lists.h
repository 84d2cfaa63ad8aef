/* The careful way from lists, numbers and arrays of another dtype into an array of the field's. */
#ifndef SHMBUS_PYTHON_CONVERT_LISTS_H
#define SHMBUS_PYTHON_CONVERT_LISTS_H

#include "python/record/declared.h"

/* Whether it is converted element by element: a list or a tuple. */
static inline bool py_is_list(PyObject *value) {
    return PyList_Check(value) || PyTuple_Check(value);
}

/* Sizes of a nested list by its first elements. Returns the number of dimensions, -1 with an
 * exception. In a list without elements no more than its own size, 0, is known. */
int py_list_sizes(PyObject *name, PyObject *value, uint64_t sizes[SHMBUS_MAX_NDIM]);

/* A new array with the elements of a nested list, or of one number where ndim is 0; NULL with an
 * exception that names field and index. Runs the code of elements that are no exact numbers. */
PyArrayObject *py_convert_list(PyObject *name, PyObject *value, PyArray_Descr *dtype,
                               enum stored_kind kind, int ndim, const uint64_t *sizes);

/* A new array with the elements of another; NULL with an exception that names field and index. */
PyArrayObject *py_convert_array(PyObject *name, PyArrayObject *array, PyArray_Descr *dtype,
                                enum stored_kind kind);

bool py_convert_add_functions(PyObject *module);

#endif
