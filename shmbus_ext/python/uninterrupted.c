/* Calls Python code that no signal's handler can interrupt.
 *
 * The interpreter runs the handlers of signals in its main thread, between any two steps of the code
 * there, and a handler may raise: KeyboardInterrupt does. So a change of several steps may stop in
 * the middle. In any other thread it cannot. Here such a change runs in a thread of its own while
 * the main thread waits for it, outside the interpreter and deaf to signals; the handlers run when
 * this returns.
 *
 * Invariant: the main thread waits only for code of ours that neither waits nor calls the user's. */
#include "python/uninterrupted.h"

#include "python/hooks.h"

struct errand {
    PyObject *callable;
    PyObject *arguments; /* a tuple */
    PyObject *result;    /* NULL with `error` */
    PyObject *error;
    PyThread_type_lock done;
};

static void run_errand(void *argument) {
    struct errand *errand = argument;
    PyGILState_STATE state = PyGILState_Ensure();
    errand->result = PyObject_Call(errand->callable, errand->arguments, NULL);
    if (errand->result == NULL) {
        errand->error = py_set_aside_error();
    }
    PyThread_type_lock done = errand->done;
    PyGILState_Release(state);
    /* The errand is on the waiter's stack: nothing of it is touched after this. */
    PyThread_release_lock(done);
}

static bool is_finalizing(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

/* Whether signals' handlers may run in this thread; -1 with an exception. */
static int is_main_thread(void) {
    static PyObject *main_thread; /* threading.main_thread, which knows of forks */
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
    /* Where the interpreter ends, no other thread enters it any more. */
    int is_main = is_finalizing() ? 0 : is_main_thread();
    if (is_main <= 0) {
        return is_main < 0 ? NULL : PyObject_Call(callable, arguments, NULL);
    }
    struct errand errand = {callable, arguments, NULL, NULL, PyThread_allocate_lock()};
    if (errand.done == NULL) {
        return PyErr_NoMemory();
    }
    PyThread_acquire_lock(errand.done, WAIT_LOCK);
    if (PyThread_start_new_thread(run_errand, &errand) == PYTHREAD_INVALID_THREAD_ID) {
        PyThread_release_lock(errand.done);
        PyThread_free_lock(errand.done);
        /* Where no thread can be had, the change is made here: an interrupt is less likely than
         * that it is needed. */
        return PyObject_Call(callable, arguments, NULL);
    }
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(errand.done, WAIT_LOCK);
    Py_END_ALLOW_THREADS
    PyThread_release_lock(errand.done);
    PyThread_free_lock(errand.done);
    if (errand.result == NULL) {
        py_restore_error(errand.error);
    }
    return errand.result;
}

/* uninterrupted(callable, *arguments): what it returns; no signal's handler runs meanwhile. */
static PyObject *py_uninterrupted(PyObject *module, PyObject *args) {
    (void)module;
    if (PyTuple_GET_SIZE(args) == 0) {
        PyErr_SetString(PyExc_TypeError, "uninterrupted: expected a callable");
        return NULL;
    }
    PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
    PyObject *result =
        rest == NULL ? NULL : py_call_uninterrupted(PyTuple_GET_ITEM(args, 0), rest);
    Py_XDECREF(rest);
    return result;
}

static PyMethodDef functions[] = {
    {"uninterrupted", py_uninterrupted, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_uninterrupted_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
