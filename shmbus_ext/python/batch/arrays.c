/* Arrays of the caller's (see arrays.h). */
#include "python/batch/arrays.h"

#include "batch/convert.h"

uint64_t py_array_elements(PyObject *object) {
    return PyArray_Check(object) ? (uint64_t)PyArray_SIZE((PyArrayObject *)object) : 0;
}

bool py_check_array(PyObject *object, const char *name, int type, uint64_t length, bool writeable,
                    void *data) {
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_NDIM(array) != 1 || PyArray_TYPE(array) != type ||
        !PyArray_IS_C_CONTIGUOUS(array) || (uint64_t)PyArray_SIZE(array) != length ||
        (writeable && !PyArray_ISWRITEABLE(array))) {
        PyArray_Descr *dtype = PyArray_DescrFromType(type);
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a contiguous%s array of dtype %R with %llu elements, got %R",
                     name, writeable ? " writable" : "", dtype, (unsigned long long)length,
                     PyArray_Check(object) ? (PyObject *)PyArray_DESCR(array) : object);
        Py_XDECREF(dtype);
        return false;
    }
    *(void **)data = PyArray_DATA(array);
    return true;
}

/* find_not_finite(array float32 [n]) -> position of the first nan or infinity, or -1. */
static PyObject *py_find_not_finite(PyObject *module, PyObject *object) {
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

static PyMethodDef functions[] = {
    {"find_not_finite", py_find_not_finite, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_arrays_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
