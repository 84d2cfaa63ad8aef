/* Python objects given to the core once, at import: exceptions, codecs, messages. */
#ifndef SHMBUS_PYTHON_HOOKS_H
#define SHMBUS_PYTHON_HOOKS_H

#include "python/binding.h"

struct hooks {
    PyObject *closed_error;      /* exception types */
    PyObject *too_large_error;
    PyObject *unscored_error;
    PyObject *full_error;        /* (segment, bytes, waited_s) -> exception */
    PyObject *busy_error;        /* (segment, what) -> exception */
    PyObject *removed_error;     /* (segment, unix_ns or 0) -> exception */
    PyObject *layout_error;      /* (name, status, found, expected) -> exception */
    PyObject *space_error;       /* (name, bytes) -> exception */
    PyObject *memory_error;      /* (name, bytes) -> exception */
    PyObject *encode_meta;       /* object -> bytes */
    PyObject *decode_meta;       /* buffer -> object */
    PyObject *encode_dtype;      /* numpy.dtype -> bytes */
    PyObject *decode_dtype;      /* bytes -> numpy.dtype */
    PyObject *as_array;          /* (name, object, declared) -> numpy.ndarray */
    PyObject *copy_trajectory;   /* tuple: the whole record, meta encoded -> TrajectoryCopy */
    PyObject *unknown_field;     /* (name, declared names) -> exception */
    PyObject *join_rows;         /* (rows, names of the remaining fields) -> [(name, value)] */
    PyObject *rows_of;           /* trajectory -> list of rows */
};
extern struct hooks hooks;
/* Raise the exception returned by a hook. */
void py_raise_hook(PyObject *hook, PyObject *arguments);

/* Take the current exception; restore an exception. */
PyObject *py_set_aside_error(void);
void py_restore_error(PyObject *error);

extern PyMethodDef py_hooks_functions[];

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
extern PyMethodDef py_uninterrupted_functions[];
/* Base class: the end of a `with` block calls `close()`, before a signal handler can run. */
extern PyTypeObject ClosedByBlockType;

#endif
