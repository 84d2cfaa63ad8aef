/* Calls of Python code without interruption by signal handlers.
 *
 * The interpreter runs signal handlers in its main thread, between two steps of the code, and a
 * handler may raise, for example KeyboardInterrupt. A change of several steps may therefore stop in
 * the middle, but only in the main thread. Here such a change runs in a helper thread while the
 * main thread waits outside the interpreter and deaf to signals; the handlers run after the return.
 *
 * Invariant: the main thread waits only for code of shmbus, never for a wait or for the user's
 * code. */
#define _GNU_SOURCE /* gettid */
#include "python/hooks.h"

#include <stdatomic.h>
#include <unistd.h>

#define ERRAND "shmbus_ext._core.errand"

/* Owned by a capsule, shared by the waiter and the thread. */
struct errand {
    PyObject *callable;
    PyObject *arguments; /* a tuple */
    PyObject *result;    /* NULL with `error` */
    PyObject *error;
    PyThread_type_lock done;
    atomic_bool claimed; /* by the thread to run, or by the waiter to give up waiting */
};

static void free_errand(PyObject *capsule) {
    struct errand *errand = PyCapsule_GetPointer(capsule, ERRAND);
    if (errand->done != NULL) {
        PyThread_free_lock(errand->done);
    }
    PyMem_Free(errand);
}

static PyObject *make_errand(PyObject *callable, PyObject *arguments) {
    struct errand *errand = PyMem_Calloc(1, sizeof *errand);
    PyObject *capsule = errand == NULL ? NULL : PyCapsule_New(errand, ERRAND, free_errand);
    if (capsule == NULL) {
        PyMem_Free(errand);
        return PyErr_NoMemory();
    }
    errand->callable = callable;
    errand->arguments = arguments;
    errand->done = PyThread_allocate_lock();
    if (errand->done == NULL) {
        Py_DECREF(capsule);
        return PyErr_NoMemory();
    }
    PyThread_acquire_lock(errand->done, WAIT_LOCK);
    return capsule;
}

static PyObject *run_errand(PyObject *capsule, PyObject *Py_UNUSED(ignored)) {
    struct errand *errand = PyCapsule_GetPointer(capsule, ERRAND);
    if (!atomic_exchange(&errand->claimed, true)) {
        errand->result = PyObject_Call(errand->callable, errand->arguments, NULL);
        if (errand->result == NULL) {
            errand->error = py_set_aside_error();
        }
        PyThread_release_lock(errand->done);
    }
    Py_RETURN_NONE;
}

static PyMethodDef run_errand_def = {"run_errand", run_errand, METH_NOARGS, NULL};

/* Start the errand's thread with an interpreter state; false with an exception. */
static bool start_thread(PyObject *capsule) {
    static PyObject *start; /* _thread.start_new_thread */
    if (start == NULL) {
        PyObject *module = PyImport_ImportModule("_thread");
        start = module == NULL ? NULL : PyObject_GetAttrString(module, "start_new_thread");
        Py_XDECREF(module);
        if (start == NULL) {
            return false;
        }
    }
    PyObject *function = PyCFunction_New(&run_errand_def, capsule);
    PyObject *nothing = function == NULL ? NULL : PyTuple_New(0);
    PyObject *ident =
        nothing == NULL ? NULL : PyObject_CallFunctionObjArgs(start, function, nothing, NULL);
    Py_XDECREF(nothing);
    Py_XDECREF(function);
    Py_XDECREF(ident);
    return ident != NULL;
}

static bool is_finalizing(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

/* 1 if signal handlers may run in this thread; -1 with an exception. */
static int is_main_thread(void) {
    static PyObject *main_thread; /* threading.main_thread, correct after forks */
    if (main_thread == NULL) {
        PyObject *threading = PyImport_ImportModule("threading");
        main_thread = threading == NULL ? NULL : PyObject_GetAttrString(threading, "main_thread");
        Py_XDECREF(threading);
        if (main_thread == NULL) {
            return -1;
        }
    }
    PyObject *thread = PyObject_CallNoArgs(main_thread);
    PyObject *ident = thread == NULL ? NULL : PyObject_GetAttrString(thread, "ident");
    Py_XDECREF(thread);
    if (ident == NULL) {
        return -1;
    }
    bool is_main = ident != Py_None && PyLong_AsUnsignedLong(ident) == PyThread_get_thread_ident();
    Py_DECREF(ident);
    return PyErr_Occurred() ? -1 : is_main;
}

PyObject *py_call_uninterrupted(PyObject *callable, PyObject *arguments) {
    /* During finalization no other thread can enter the interpreter. */
    int is_main = is_finalizing() ? 0 : is_main_thread();
    if (is_main <= 0) {
        return is_main < 0 ? NULL : PyObject_Call(callable, arguments, NULL);
    }
    PyObject *capsule = make_errand(callable, arguments);
    if (capsule == NULL) {
        return NULL;
    }
    struct errand *errand = PyCapsule_GetPointer(capsule, ERRAND);
    /* Without memory for the thread's number, start_thread raises although the thread began. */
    if (!start_thread(capsule) && !atomic_exchange(&errand->claimed, true)) {
        Py_DECREF(capsule);
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            return NULL;
        }
        /* Without a thread run the change here: skipping the change would be worse than a possible
         * interrupt. */
        PyErr_Clear();
        return PyObject_Call(callable, arguments, NULL);
    }
    PyErr_Clear();
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(errand->done, WAIT_LOCK);
    Py_END_ALLOW_THREADS
    PyThread_release_lock(errand->done);
    PyObject *result = errand->result;
    if (result == NULL) {
        py_restore_error(errand->error);
    }
    Py_DECREF(capsule);
    return result;
}

/* uninterrupted(callable, *arguments): the call's result; no signal handler runs meanwhile. */
PyObject *py_uninterrupted(PyObject *Py_UNUSED(module), PyObject *args) {
    if (PyTuple_GET_SIZE(args) == 0) {
        return PyErr_Format(PyExc_TypeError, "uninterrupted: expected a callable");
    }
    PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
    PyObject *result =
        rest == NULL ? NULL : py_call_uninterrupted(PyTuple_GET_ITEM(args, 0), rest);
    Py_XDECREF(rest);
    return result;
}

/* ---- Closing at the end of a `with` block, even if a signal handler raises at its end.
 *
 * A handler may raise as soon as a Python function begins, so an `__exit__` in Python may end
 * before its first step. This `__exit__` in C avoids the gap, and calls an interrupted `close()`
 * again.
 *
 * Invariant: the first exception propagates. */
static PyObject *enter(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    return Py_NewRef(self);
}

static PyObject *leave(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)args, (void)count;
    PyObject *closed = PyObject_CallMethodNoArgs(self, py_word.close);
    if (closed == NULL) {
        PyObject *error = py_set_aside_error();
        Py_XDECREF(PyObject_CallMethodNoArgs(self, py_word.close));
        PyErr_Clear(); /* if the retry fails, too, the first error tells the reason */
        py_restore_error(error);
        return NULL;
    }
    Py_DECREF(closed);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"__enter__", enter, METH_NOARGS, NULL},
    METHOD("__exit__", leave, METH_FASTCALL, NULL),
    {NULL, NULL, 0, NULL},
};

PyTypeObject ClosedByBlockType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "shmbus_ext._core.ClosedByBlock",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_doc = "ClosedByBlock()\n--\n\n"
              "The end of a with block calls close(), once more where an exception cut it short.",
    .tp_methods = methods,
    .tp_new = PyType_GenericNew,
};

/* ---- Python code whose exceptions nobody gets, without a loss of a signal handler's exception.
 *
 * The interpreter prints an exception of `__del__` and goes on, and a handler may raise at the first
 * step of `__del__`: a Ctrl-C would end nothing. Here an interrupted function runs once more, and
 * the main thread raises the exception at its next step, or in a wait of the core.
 *
 * Invariant: the function is idempotent. */
static int raise_pending(void *error) {
    py_restore_error(error);
    return -1;
}

PyObject *py_call_idempotent(PyObject *function, PyObject *arguments) {
    PyObject *done = PyObject_CallObject(function, arguments);
    /* Signal handlers run in the main thread only; another thread's exception is the function's. */
    if (done != NULL || gettid() != getpid()) {
        return done;
    }
    PyObject *error = py_set_aside_error();
    (void)PyException_SetTraceback(error, Py_None); /* its frames would keep the object */
    done = PyObject_CallObject(function, arguments);
    if (done == NULL || Py_AddPendingCall(raise_pending, error) < 0) {
        Py_CLEAR(done);
        PyErr_Clear(); /* the first error tells the reason */
        py_restore_error(error);
    }
    return done;
}

static PyMethodDef finalizer_def = {"__del__", py_call_idempotent, METH_VARARGS, NULL};

/* finalizer(function): the method `__del__` that calls function. */
PyObject *py_finalizer(PyObject *Py_UNUSED(module), PyObject *function) {
    PyObject *run = PyCFunction_New(&finalizer_def, function);
    PyObject *method = run == NULL ? NULL : PyInstanceMethod_New(run);
    Py_XDECREF(run);
    return method;
}
