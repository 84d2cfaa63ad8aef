/* Python objects given to the core once, at import: exceptions, codecs, messages. */
#pragma once

#include "python/binding.h"

/* Types and calls are in _core.pyi, at `install`. */
#define HOOKS(X)                                                                                 \
    X(closed_error) X(too_large_error) X(unscored_error) X(full_error) X(busy_error)             \
    X(removed_error) X(layout_error) X(space_error) X(memory_error) X(encode_meta)               \
    X(decode_meta) X(encode_dtype) X(decode_dtype) X(as_array) X(copy_trajectory)                \
    X(unknown_field) X(join_rows) X(rows_of)
extern struct hooks {
    HOOKS(PY_OBJECT)
} hooks;
/* Raise the exception returned by a hook. */
void py_raise_hook(PyObject *hook, PyObject *arguments);

/* Take the current exception; restore an exception. */
PyObject *py_set_aside_error(void);
void py_restore_error(PyObject *error);

PyObject *py_install(PyObject *module, PyObject *args, PyObject *kwargs);

/* ---- Kernel errors as exceptions; the message names a missing requirement of shmbus. */
/* Raise OSError of errno for an open "bus", "pool" or "channel"; return NULL. */
PyObject *py_raise_system(const char *kind, PyObject *name);

/* ---- The watchdog of a wait: called with the seconds waited, at the end of every period. */
struct watch {
    PyObject *call;  /* call(waited_s); may be NULL */
    double period_s;
};

/* Time of the first call, in seconds of the wait; never without a watchdog. */
double py_watch_first_s(const struct watch *self);
/* Call the watchdog and set the time of the next call; false with an exception, ending the wait. */
bool py_watch_call(const struct watch *self, double waited_s, double *next_s);

/* ---- Python code without interruption by signal handlers. */
/* Return the result of callable(*arguments), or raise. From the main thread the call runs in a
 * helper thread and must not take a lock held by the caller. Steals no reference. */
PyObject *py_call_uninterrupted(PyObject *callable, PyObject *arguments);
PyObject *py_uninterrupted(PyObject *module, PyObject *args);
PyObject *py_finalizer(PyObject *module, PyObject *function);
/* Return the result of function(*arguments), or raise the function's own exception; an exception of
 * a signal handler is raised later. */
PyObject *py_call_idempotent(PyObject *function, PyObject *arguments);
/* Base class: the end of a `with` block calls `close()`, before a signal handler can run. */
extern PyTypeObject ClosedByBlockType;
