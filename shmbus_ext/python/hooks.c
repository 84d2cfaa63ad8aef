/* Python objects given to the core once, at import (see hooks.h).
 *
 * Invariant: importing `shmbus` sets every hook before the first call of another function. */
#include "python/hooks.h"

#include <errno.h>
#include <math.h>
#include <unistd.h>


struct hooks hooks;

void py_raise_hook(PyObject *hook, PyObject *arguments) {
    if (arguments == NULL) {
        return;
    }
    PyObject *error = PyObject_CallObject(hook, arguments);
    Py_DECREF(arguments);
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
}

PyObject *py_install(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args), PyObject *kwargs) {
#define NAME(hook) #hook,
    static const char *const names[] = {HOOKS(NAME)};
    PyObject **to = (PyObject **)&hooks;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        PyObject *hook = kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, names[i]);
        NEVER(hook == NULL, NULL);
        Py_XSETREF(to[i], Py_NewRef(hook));
    }
    Py_RETURN_NONE;
}

PyObject *py_set_aside_error(void) {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
#endif
}

void py_restore_error(PyObject *error) {
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

/* ---- Kernel errors. */
PyObject *py_raise_system(const char *kind, PyObject *name) {
    int why = errno;
    /* The file is already open: only the way to open the file a second time is missing. */
    if (why == ENOENT && access("/proc/self/fd", F_OK) != 0) {
        return PyErr_Format(PyExc_OSError,
                            "%s '%U': this process needs /proc/self/fd, to map a %s apart from its "
                            "locks, and there is no /proc here; mount it (mount -t proc proc "
                            "/proc), or start the container with it",
                            kind, name, kind);
    }
    errno = why;
    return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, name);
}

/* ---- The watchdog of a wait. */
double py_watch_first_s(const struct watch *self) {
    return self->call == NULL ? INFINITY : self->period_s;
}

bool py_watch_call(const struct watch *self, double waited_s, double *next_s) {
    if (self->call == NULL) {
        return true;
    }
    *next_s = waited_s + self->period_s;
    /* The call may replace itself. */
    PyObject *call = Py_NewRef(self->call);
    PyObject *result = PyObject_CallFunction(call, "d", waited_s);
    Py_DECREF(call);
    Py_XDECREF(result);
    return result != NULL;
}
