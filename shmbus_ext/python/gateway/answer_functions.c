/* gateway/last_byte.c and gateway/first_request.c for Python: the last byte of an answer, and polls.
 *
 * Invariant: the interpreter's lock is held throughout, so that no other thread of this process
 * comes between a byte and its note. None of these calls waits. */
#include "python/gateway/answer_functions.h"

#include <errno.h>

#include "gateway/first_request.h"
#include "gateway/last_byte.h"

/* Bytes of a first request that are read with its connection: the longest poll, and more. */
enum { FIRST_REQUEST_BYTES = 2048 };

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

/* accept_request(listener) -> (socket, bytes) | None: None where no connection waits. */
static PyObject *py_accept_request(PyObject *module, PyObject *listener) {
    (void)module;
    int descriptor = PyObject_AsFileDescriptor(listener);
    if (descriptor < 0) {
        return NULL;
    }
    char bytes[FIRST_REQUEST_BYTES];
    size_t count = 0;
    int found = first_request_accept(descriptor, bytes, sizeof bytes, &count);
    if (found == -EAGAIN) {
        Py_RETURN_NONE;
    }
    if (found < 0) {
        errno = -found;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    PyObject *pair = Py_BuildValue("iy#", found, bytes, (Py_ssize_t)count);
    if (pair == NULL) {
        first_request_answer(found, "", 0);
    }
    return pair;
}

/* answer_and_close(socket, answer) */
static PyObject *py_answer_and_close(PyObject *module, PyObject *args) {
    (void)module;
    int socket;
    Py_buffer answer;
    if (!PyArg_ParseTuple(args, "iy*", &socket, &answer)) {
        return NULL;
    }
    first_request_answer(socket, answer.buf, (size_t)answer.len);
    PyBuffer_Release(&answer);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"accept_request", py_accept_request, METH_O, NULL},
    {"answer_and_close", py_answer_and_close, METH_VARARGS, NULL},
    {"send_last_byte", py_send_last_byte, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_answer_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
