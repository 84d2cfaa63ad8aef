/* batch/threads.c for Python: helpers that start when they are first used, and end with their object.
 *
 * Invariants:
 * - Helpers never call Python, so they need no lock of its.
 * - They end when no call copies by them any more: `users` counts these. */
#include "python/batch/gather_threads.h"

#include <errno.h>

/* More would only wait for memory; a count above is a mistake. */
#define MOST_THREADS 64

typedef struct {
    PyObject_HEAD
    struct threads *threads; /* NULL with one thread, before the first use, and once closed */
    unsigned int count;
    unsigned int users;
    bool closed;
} GatherThreadsObject;

static void end_if_unused(GatherThreadsObject *self) {
    struct threads *threads = self->threads;
    if (!self->closed || self->users > 0 || threads == NULL) {
        return;
    }
    self->threads = NULL;
    Py_BEGIN_ALLOW_THREADS
    threads_end(threads);
    Py_END_ALLOW_THREADS
}

bool py_gather_threads_check(PyObject *object) {
    if (object != Py_None && !Py_IS_TYPE(object, &GatherThreadsType)) {
        PyErr_Format(PyExc_TypeError, "threads: expected GatherThreads or None, got %.100s",
                     Py_TYPE(object)->tp_name);
        return false;
    }
    return true;
}

bool py_gather_threads_begin(PyObject *object, struct threads **threads) {
    GatherThreadsObject *self = (GatherThreadsObject *)object;
    *threads = NULL;
    if (object == Py_None) {
        return true;
    }
    if (self->threads == NULL && self->count > 1 && !self->closed) {
        self->threads = threads_start(self->count - 1);
        if (self->threads == NULL) {
            PyErr_Format(PyExc_OSError,
                         "pack_threads: %u threads could not be started: %s; ask for fewer, or "
                         "for 1",
                         self->count, strerror(errno));
            return false;
        }
    }
    self->users++;
    *threads = self->closed ? NULL : self->threads;
    return true;
}

void py_gather_threads_finish(PyObject *object) {
    if (object != Py_None) {
        GatherThreadsObject *self = (GatherThreadsObject *)object;
        self->users--;
        end_if_unused(self);
    }
}

static PyObject *py_gather_threads_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    unsigned int count;
    if (!PyArg_ParseTuple(args, "I", &count)) {
        return NULL;
    }
    if (count < 1 || count > MOST_THREADS) {
        return PyErr_Format(PyExc_ValueError, "threads: expected 1 to %d, got %u", MOST_THREADS,
                            count);
    }
    GatherThreadsObject *self = (GatherThreadsObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->count = count;
    return (PyObject *)self;
}

/* close(): ends the threads; whoever packs by them afterwards does so alone. */
static PyObject *py_gather_threads_close(GatherThreadsObject *self, PyObject *ignored) {
    (void)ignored;
    self->closed = true;
    end_if_unused(self);
    Py_RETURN_NONE;
}

static void py_gather_threads_dealloc(GatherThreadsObject *self) {
    self->closed = true;
    end_if_unused(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"close", (PyCFunction)(void (*)(void))py_gather_threads_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"count", T_UINT, offsetof(GatherThreadsObject, count), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

bool py_gather_threads_add_constants(PyObject *module) {
    (void)module;
    PyObject *most = PyLong_FromLong(MOST_THREADS);
    bool added = most != NULL &&
                 PyDict_SetItemString(GatherThreadsType.tp_dict, "MOST", most) == 0;
    Py_XDECREF(most);
    return added;
}

PyTypeObject GatherThreadsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.GatherThreads",
    .tp_basicsize = sizeof(GatherThreadsObject),
    .tp_dealloc = (destructor)py_gather_threads_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = methods,
    .tp_members = members,
    .tp_new = py_gather_threads_new,
};
