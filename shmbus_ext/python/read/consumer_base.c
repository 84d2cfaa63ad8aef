/* ConsumerBase.take is what users call: in C, since a consumer that polls calls little else, and
 * one that was just woken pays for each line of Python.
 *
 * Invariant: it knows plain numbers, labels, and an Intake; every other call goes to `_take` of its
 * subclass, with the same arguments. */
#include "python/read/read.h"

#include <math.h>

#include "python/group/group.h"
#include "public_docs.h"
#include "python/segment/segment.h"
#include "ring/doorbell.h"

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

/* ---- What ends a lease: records are released in the ring, entries leave their table, and groups get
 * their new state, all of it in one call.
 *
 * Invariant: between the first and the last of these steps no code of Python's runs, so no signal's
 * handler does, and a lease that ends has ended for all three. */
/* The entry of a group that this consumer holds under lease by this table, borrowed; NULL, without
 * an exception, of anything else. */
static GroupEntryObject *entry_of(PyObject *group, PyObject *consumer,
                                  const GroupTableObject *table) {
    PyObject *lease = py_group_lease(group, consumer);
    return lease != NULL && py_group_lists_have_leased(&table->lists, lease)
               ? (GroupEntryObject *)lease
               : NULL;
}

/* end_groups(reader, table, consumer, groups, reason, state) -> int: ends the leases of groups from the first
 * on, until one is not this consumer's, or not held. How many. Each is ended in the ring, in the
 * table and by its own account in one step, which nothing can interrupt. */
static PyObject *py_end_groups(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *reader, *table, *consumer, *groups, *state;
    int reason;
    if (!PyArg_ParseTuple(args, "O!O!OO!iU", &ReaderType, &reader, &GroupTableType, &table,
                          &consumer, &PyList_Type, &groups, &reason, &state) ||
        !py_reader_usable((ReaderObject *)reader)) {
        return NULL;
    }
    Py_ssize_t done = 0;
    for (; done < PyList_GET_SIZE(groups); done++) {
        PyObject *group = PyList_GET_ITEM(groups, done);
        GroupEntryObject *entry = entry_of(group, consumer, (GroupTableObject *)table);
        if (entry == NULL) {
            break;
        }
        if (!py_reader_release_all((ReaderObject *)reader, entry->samples, reason)) {
            return NULL;
        }
        py_group_entry_end(entry);
        py_group_set_state(group, state);
    }
    return PyLong_FromSsize_t(done);
}

/* give_back_group(reader, table, consumer, group, state) -> bool: makes it the next to be leased, as
 * end_groups ends it; False of one that is not this consumer's, or not held. */
static PyObject *py_give_back_group(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *reader, *table, *consumer, *group, *state;
    if (!PyArg_ParseTuple(args, "O!O!OOU", &ReaderType, &reader, &GroupTableType, &table,
                          &consumer, &group, &state) ||
        !py_reader_usable((ReaderObject *)reader)) {
        return NULL;
    }
    GroupEntryObject *entry = entry_of(group, consumer, (GroupTableObject *)table);
    if (entry == NULL) {
        Py_RETURN_FALSE;
    }
    py_group_entry_give_back(entry);
    py_group_set_state(group, state);
    /* Also to who sleeps in take. */
    doorbell_ring(((ReaderObject *)reader)->segment->c.header);
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {
    {"end_groups", py_end_groups, METH_VARARGS, NULL},
    {"give_back_group", py_give_back_group, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_end_lease_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
