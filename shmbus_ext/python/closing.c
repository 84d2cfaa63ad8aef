/* What a `with` block closes, also where a signal's handler raises at its end (see closing.h).
 *
 * A handler may raise as soon as a function of Python begins, so an `__exit__` in Python may end
 * before its first step. This one is none, and where `close()` was cut short it is called again.
 *
 * Invariant: the exception that comes out is the first one. */
#include "python/closing.h"

#include "python/hooks.h"

static PyObject *close_word;

static PyObject *enter(PyObject *self, PyObject *ignored) {
    (void)ignored;
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
    {"__exit__", (PyCFunction)(void (*)(void))leave, METH_FASTCALL, NULL},
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
