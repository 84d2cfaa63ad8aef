/* A set of weights is far larger than any cache: by ordinary stores each line that is written would
 * be fetched first, which is a third of the traffic. */
#include "python/pool/pool_copy.h"

#include "base/copy.h"

/* pool_copy(target, source): two buffers of the same length that do not overlap. */
static PyObject *py_pool_copy(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer target, source;
    if (!PyArg_ParseTuple(args, "w*y*", &target, &source)) {
        return NULL;
    }
    bool fits = target.len == source.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_non_temporal(target.buf, source.buf, (size_t)source.len);
        copy_fence();
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "copy: expected buffers of one length, got %zd and %zd",
                     target.len, source.len);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    if (!fits) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"pool_copy", py_pool_copy, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_pool_copy_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
