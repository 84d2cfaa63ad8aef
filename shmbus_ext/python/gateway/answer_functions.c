/* gateway/last_byte.c for Python: the last byte of an answer.
 *
 * Invariant: the interpreter's lock is held throughout, so that no other thread of this process
 * comes between a byte and its note. */
#include "python/gateway/answer_functions.h"

#include <errno.h>

#include "gateway/last_byte.h"

/* send_last_byte(socket, byte, notes, at, number) -> bool: False where the socket has no room. */
static PyObject *py_send_last_byte(PyObject *module, PyObject *args) {
    (void)module;
    int socket;
    char byte;
    Py_buffer notes;
    Py_ssize_t at;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "icw*nK", &socket, &byte, &notes, &at, &number)) {
        return NULL;
    }
    int failure = 0;
    bool fits = at >= 0 && at % 8 == 0 && at <= notes.len - 8;
    if (fits) {
        failure = last_byte_send(socket, byte, (void *)((char *)notes.buf + at), number);
    }
    PyBuffer_Release(&notes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "at: expected 8 aligned bytes of the notes, got others");
        return NULL;
    }
    if (failure != 0 && failure != EAGAIN) {
        errno = failure;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyBool_FromLong(failure == 0);
}

static PyMethodDef functions[] = {
    {"send_last_byte", py_send_last_byte, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_answer_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
