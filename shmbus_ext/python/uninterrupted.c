/* Calls Python code that no signal's handler can interrupt.
 *
 * The interpreter runs the handlers of signals in its main thread, between any two steps of the code
 * there, and a handler may raise: KeyboardInterrupt does. So a change of several steps may stop in
 * the middle. In any other thread it cannot. Here such a change runs in a thread of its own while
 * the main thread waits for it, outside the interpreter and deaf to signals; the handlers run when
 * this returns.
 *
 * Invariant: the main thread waits only for code of ours that neither waits nor calls the user's. */
#include "python/hooks.h"

#include <stdatomic.h>

#define ERRAND "shmbus_ext._core.errand"

/* Owned by a capsule, which the waiter and the thread both have. */
struct errand {
    PyObject *callable;
    PyObject *arguments; /* a tuple */
    PyObject *result;    /* NULL with `error` */
    PyObject *error;
    PyThread_type_lock done;
    atomic_bool claimed; /* by the thread, which runs it, or by the waiter, which then must not wait */
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

/* Starts the errand's thread, with a state of the interpreter's; false with an exception. */
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
    PyObject *capsule = make_errand(callable, arguments);
    if (capsule == NULL) {
        return NULL;
    }
    struct errand *errand = PyCapsule_GetPointer(capsule, ERRAND);
    /* Without memory for the thread's number, it has begun and an exception says that it has not. */
    if (!start_thread(capsule) && !atomic_exchange(&errand->claimed, true)) {
        Py_DECREF(capsule);
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            return NULL;
        }
        /* Without a thread the change is made here: it is needed more than an interrupt is likely. */
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

/* uninterrupted(callable, *arguments): what it returns; no signal's handler runs meanwhile. */
static PyObject *py_uninterrupted(PyObject *Py_UNUSED(module), PyObject *args) {
    if (PyTuple_GET_SIZE(args) == 0) {
        return PyErr_Format(PyExc_TypeError, "uninterrupted: expected a callable");
    }
    PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
    PyObject *result =
        rest == NULL ? NULL : py_call_uninterrupted(PyTuple_GET_ITEM(args, 0), rest);
    Py_XDECREF(rest);
    return result;
}

PyMethodDef py_uninterrupted_functions[] = {
    {"uninterrupted", py_uninterrupted, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* ---- What a `with` block closes, also where a signal's handler raises at its end.
 *
 * A handler may raise as soon as a function of Python begins, so an `__exit__` in Python may end
 * before its first step. This one is none, and where `close()` was cut short it is called again.
 *
 * Invariant: the exception that comes out is the first one. */
static PyObject *close_word;

static PyObject *enter(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    return Py_NewRef(self);
}

static PyObject *leave(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)args, (void)count;
    PyObject *closed = PyObject_CallMethodNoArgs(self, close_word);
    if (closed == NULL) {
        PyObject *error = py_set_aside_error();
        Py_XDECREF(PyObject_CallMethodNoArgs(self, close_word));
        PyErr_Clear(); /* where it fails again, the first says why */
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

bool py_closing_init(void) {
    const struct word_note words[] = {{&close_word, "close"}};
    return INTERN_WORDS(words);
}
