/* ConsumerBase: the take of shmbus.Consumer. It is in C since a reader that polls calls little else,
 * and for one that was just woken each line of Python costs as much as all of this.
 *
 * It knows plain numbers and an intake. Whatever else is given, and a Consumer without an intake,
 * is a matter of the subclass: of its `_take`, which takes the same arguments. */
#include "take.h"

#include <math.h>

typedef struct {
    PyObject_HEAD
    PyObject *intake; /* None until there is one */
} ConsumerObject;

static struct {
    PyObject *max_groups, *timeout, *take;
} word;

static bool read_groups(PyObject *value, struct wanted *wanted) {
    if (!PyLong_CheckExact(value)) {
        return false;
    }
    int overflow;
    long groups = PyLong_AsLongAndOverflow(value, &overflow);
    wanted->groups = overflow > 0 ? PY_SSIZE_T_MAX : groups;
    return wanted->groups >= 1;
}

static bool read_timeout(PyObject *value, struct wanted *wanted) {
    if (PyFloat_CheckExact(value)) {
        wanted->timeout_s = PyFloat_AS_DOUBLE(value);
    } else if (PyLong_CheckExact(value)) {
        int overflow;
        long timeout_s = PyLong_AsLongAndOverflow(value, &overflow);
        wanted->timeout_s = overflow != 0 ? -1.0 : (double)timeout_s;
    } else {
        wanted->timeout_s = value == Py_None ? INFINITY : -1.0;
    }
    return wanted->timeout_s >= 0;
}

/* False for what `_take` has to look at. */
static bool read_call(struct wanted *wanted, PyObject *const *args, Py_ssize_t count,
                      PyObject *kwnames) {
    if (count > 2 || (count > 0 && !read_groups(args[0], wanted)) ||
        (count > 1 && !read_timeout(args[1], wanted))) {
        return false;
    }
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        PyObject *value = args[count + i];
        /* Names in a call are interned. */
        if (!(name == word.timeout && count < 2 && read_timeout(value, wanted)) &&
            !(name == word.max_groups && count < 1 && read_groups(value, wanted))) {
            return false;
        }
    }
    return true;
}

static PyObject *consumer_take(ConsumerObject *self, PyObject *const *args, Py_ssize_t count,
                               PyObject *kwnames) {
    struct wanted wanted = {(PyObject *)self, 64, 0.1};
    if (self->intake != NULL && Py_IS_TYPE(self->intake, &IntakeType) &&
        intake_is_open((IntakeObject *)self->intake) && read_call(&wanted, args, count, kwnames)) {
        PyObject *intake = Py_NewRef(self->intake);
        PyObject *groups = intake_take((IntakeObject *)intake, &wanted);
        Py_DECREF(intake);
        return groups;
    }
    PyObject *take = PyObject_GetAttr((PyObject *)self, word.take);
    PyObject *groups =
        take == NULL ? NULL : PyObject_Vectorcall(take, args, (size_t)count, kwnames);
    Py_XDECREF(take);
    return groups;
}

static int consumer_traverse(ConsumerObject *self, visitproc visit, void *arg) {
    Py_VISIT(self->intake);
    return 0;
}

static int consumer_clear(ConsumerObject *self) {
    Py_CLEAR(self->intake);
    return 0;
}

static void consumer_dealloc(ConsumerObject *self) {
    PyObject_GC_UnTrack(self);
    consumer_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef consumer_methods[] = {
    {"take", (PyCFunction)(void (*)(void))consumer_take, METH_FASTCALL | METH_KEYWORDS,
     "take($self, max_groups=64, timeout=0.1)\n--\n\n"
     "Take complete groups, in the order of completion, as soon as there is one.\n\n"
     "Parameters\n----------\n"
     "max_groups : int\n    How many at the most. With ranks, how many each rank gets at the most of\n"
     "    the next step, whose shard for this rank is taken; all ranks say the same number.\n"
     "timeout : float, optional\n"
     "    Seconds to wait for the first: None waits for ever, 0 does not wait.\n\n"
     "Returns\n-------\n"
     "list[Group]\n"
     "    Maybe empty. Each is leased to the caller until it is acknowledged or given back.\n\n"
     "Raises\n------\n"
     "ProtocolError\n"
     "    A duplicate came, under ``duplicate=\"error\"``; once for each, with nothing lost.\n"
     "StallError\n    Nothing has moved for too long, under ``on_stall=\"raise\"``.\n"
     "BusBusyError\n    This Consumer has no rank, and ranks have come back to a restarted daemon.\n"
     "BusClosedError\n    The consumer is closed, or was made before a fork.\n"},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef consumer_members[] = {
    {"_intake", T_OBJECT, offsetof(ConsumerObject, intake), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ConsumerBaseType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.ConsumerBase",
    .tp_basicsize = sizeof(ConsumerObject),
    .tp_dealloc = (destructor)consumer_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)consumer_traverse,
    .tp_clear = (inquiry)consumer_clear,
    .tp_methods = consumer_methods,
    .tp_members = consumer_members,
    .tp_new = PyType_GenericNew,
};

bool consumer_add_words(void) {
    const struct word_note words[] = {
        {&word.max_groups, "max_groups"},
        {&word.timeout, "timeout"},
        {&word.take, "_take"},
    };
    return INTERN_WORDS(words);
}
