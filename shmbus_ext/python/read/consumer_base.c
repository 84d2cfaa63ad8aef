/* ConsumerBase.take is what users call: in C, since a consumer that polls calls little else, and
 * one that was just woken pays for each line of Python.
 *
 * Invariant: it knows plain numbers, labels, and an Intake; every other call goes to `_take` of its
 * subclass, with the same arguments. */
#include "python/read/consumer_base.h"

#include <math.h>

#include "public_docs.h"
#include "python/read/take.h"
#include "python/segment/segment.h"

/* What take asks for where its caller does not say. */
#define DEFAULT_GROUPS 64
#define DEFAULT_TIMEOUT_S 0.1

typedef struct {
    PyObject_HEAD
    PyObject *intake;   /* None until there is one */
    unsigned int split; /* the number of what is taken where the call does not say */
} ConsumerObject;

static struct {
    PyObject *max_groups, *timeout, *split, *take;
} word;

static bool read_groups(PyObject *value, struct take_request *request) {
    if (!PyLong_CheckExact(value)) {
        return false;
    }
    int overflow;
    long groups = PyLong_AsLongAndOverflow(value, &overflow);
    request->groups = overflow > 0 ? PY_SSIZE_T_MAX : groups;
    return request->groups >= 1;
}

static bool read_timeout(PyObject *value, struct take_request *request) {
    if (PyFloat_CheckExact(value)) {
        request->timeout_s = PyFloat_AS_DOUBLE(value);
    } else if (PyLong_CheckExact(value)) {
        int overflow;
        long timeout_s = PyLong_AsLongAndOverflow(value, &overflow);
        request->timeout_s = overflow != 0 ? -1.0 : (double)timeout_s;
    } else {
        request->timeout_s = value == Py_None ? INFINITY : -1.0;
    }
    return request->timeout_s >= 0;
}

static bool read_split(PyObject *value, struct take_request *request, SegmentObject *segment) {
    if (value == Py_None) {
        return true;
    }
    request->split = py_split_check(value) ? py_split_number(segment, value) : SHMBUS_MAX_SPLITS;
    PyErr_Clear(); /* `_take` raises it again */
    return request->split < SHMBUS_MAX_SPLITS;
}

/* False for a call that is left to `_take`. */
static bool read_call(struct take_request *request, PyObject *const *args, Py_ssize_t count,
                      PyObject *kwnames, SegmentObject *segment) {
    if (count > 2 || (count > 0 && !read_groups(args[0], request)) ||
        (count > 1 && !read_timeout(args[1], request))) {
        return false;
    }
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        PyObject *value = args[count + i];
        /* Names in a call are interned. */
        if (!(name == word.timeout && count < 2 && read_timeout(value, request)) &&
            !(name == word.max_groups && count < 1 && read_groups(value, request)) &&
            !(name == word.split && read_split(value, request, segment))) {
            return false;
        }
    }
    return true;
}

static PyObject *py_consumer_take(ConsumerObject *self, PyObject *const *args, Py_ssize_t count,
                                  PyObject *kwnames) {
    struct take_request request = {(PyObject *)self, DEFAULT_GROUPS, DEFAULT_TIMEOUT_S,
                                   self->split};
    SegmentObject *segment = self->intake != NULL && Py_IS_TYPE(self->intake, &IntakeType)
                                 ? py_intake_segment(self->intake)
                                 : NULL;
    if (segment != NULL && read_call(&request, args, count, kwnames, segment)) {
        PyObject *intake = Py_NewRef(self->intake);
        PyObject *groups = py_intake_take(intake, &request);
        Py_DECREF(intake);
        return groups;
    }
    PyObject *method = PyObject_GetAttr((PyObject *)self, word.take);
    PyObject *groups =
        method == NULL ? NULL : PyObject_Vectorcall(method, args, (size_t)count, kwnames);
    Py_XDECREF(method);
    return groups;
}

static int py_consumer_traverse(ConsumerObject *self, visitproc visit, void *arg) {
    Py_VISIT(self->intake);
    return 0;
}

static int py_consumer_clear(ConsumerObject *self) {
    Py_CLEAR(self->intake);
    return 0;
}

static void py_consumer_dealloc(ConsumerObject *self) {
    PyObject_GC_UnTrack(self);
    py_consumer_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef consumer_methods[] = {
    {"take", (PyCFunction)(void (*)(void))py_consumer_take, METH_FASTCALL | METH_KEYWORDS,
     DOC_ConsumerBase_take},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef consumer_members[] = {
    {"_intake", T_OBJECT, offsetof(ConsumerObject, intake), 0, NULL},
    {"_split", T_UINT, offsetof(ConsumerObject, split), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ConsumerBaseType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.ConsumerBase",
    .tp_basicsize = sizeof(ConsumerObject),
    .tp_dealloc = (destructor)py_consumer_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)py_consumer_traverse,
    .tp_clear = (inquiry)py_consumer_clear,
    .tp_doc = "``take``; what it does not know it leaves to ``_take`` of the subclass.",
    .tp_methods = consumer_methods,
    .tp_members = consumer_members,
    .tp_new = PyType_GenericNew,
};

bool py_take_add_words(void) {
    const struct word_note words[] = {
        {&word.max_groups, "max_groups"},
        {&word.timeout, "timeout"},
        {&word.split, "split"},
        {&word.take, "_take"},
    };
    return INTERN_WORDS(words);
}
