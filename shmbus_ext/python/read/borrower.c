/* Borrower: holds the groups that a daemon leased to this process, and hands them out. They come in
 * receive_leases.c, their locks are in borrower_state.c, their ends in lease_ends.c.
 *
 * Invariants:
 *  - The segment is mapped read-only; nothing that a message or the segment says is used before it
 *    is bounded and its frame's checksum, which is salted with its place, has been found right.
 *  - A lease that was received is in `ready` until it is handed out. Each call changes the locks,
 *    the dictionary of all leases and `ready` together: no signal's handler runs in between. */
#include "python/read/borrower.h"

#include "python/group/group.h"
#include "python/hooks.h"
#include "python/read/borrower_state.h"
#include "python/read/lease_ends.h"
#include "python/read/receive_leases.h"

static const struct holder_kind borrower_kind = {false, py_borrower_hold_views,
                                                 py_borrower_let_go_of_views,
                                                 py_borrower_take_back};

static int py_borrower_init(BorrowerObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", NULL};
    SegmentObject *segment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &SegmentType, &segment)) {
        return -1;
    }
    if (self->segment != NULL) {
        PyErr_SetString(PyExc_TypeError, "this borrower is initialised already");
        return -1;
    }
    if (!py_holder_init((HolderObject *)self, segment, &borrower_kind) ||
        !py_segment_usable(segment, "handle")) {
        return -1;
    }
    self->lease_counts = PyMem_Calloc(segment->c.extent_count, sizeof *self->lease_counts);
    self->view_counts = PyMem_Calloc(segment->c.extent_count, sizeof *self->view_counts);
    self->changed = PyMem_Calloc(segment->c.extent_count, sizeof *self->changed);
    if (self->lease_counts == NULL || self->view_counts == NULL || self->changed == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->received = PyMem_Malloc(BORROWER_RECEIVED_BYTES);
    self->ready = PyList_New(0);
    if (self->received == NULL || self->ready == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->attached = true;
    return 0;
}

/* set_client(number): the leases' locks are under this number from now on. */
static PyObject *py_borrower_set_client(BorrowerObject *self, PyObject *argument) {
    unsigned long client = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !py_borrower_usable(self)) {
        return NULL;
    }
    if (client >= SHMBUS_MAX_CLIENTS) {
        PyErr_Format(PyExc_ValueError, "client: expected 0 to %u, got %lu", SHMBUS_MAX_CLIENTS - 1,
                     client);
        return NULL;
    }
    if (!py_borrower_move_locks(self, (uint32_t)client)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Makes a group of a lease that was ready, and appends it. */
static bool append_group(PyObject *groups, PyTypeObject *kind, PyObject *consumer,
                         ClientLeaseObject *lease) {
    PyObject *group = py_group_new(kind, consumer, (PyObject *)lease);
    if (group == NULL) {
        py_borrower_take_back(lease->borrower, (PyObject *)lease);
        return false;
    }
    /* A group that cannot be appended returns its lease by dying here. */
    bool good = PyList_Append(groups, group) == 0;
    Py_DECREF(group);
    return good;
}

/* hand_out(kind, consumer, limit) -> list of groups: what has been ready longest; with a limit of -1
 * all of one step. */
static PyObject *py_borrower_hand_out(BorrowerObject *self, PyObject *args) {
    PyObject *kind, *consumer;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "O!On", &PyType_Type, &kind, &consumer, &limit) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    if (!PyType_IsSubtype((PyTypeObject *)kind, &GroupBaseType)) {
        PyErr_SetString(PyExc_TypeError, "kind: expected a type that is made of GroupBase");
        return NULL;
    }
    PyObject *groups = PyList_New(0);
    long long step = 0;
    while (groups != NULL && (limit < 0 || PyList_GET_SIZE(groups) < limit)) {
        ClientLeaseObject *lease = py_borrower_pop_ready(self);
        if (lease == NULL) {
            break;
        }
        bool first = PyList_GET_SIZE(groups) == 0;
        step = first ? lease->step : step;
        if (limit < 0 && lease->step != step) {
            py_borrower_take_back((HolderObject *)self, (PyObject *)lease);
            Py_DECREF(lease);
            break;
        }
        bool good = append_group(groups, (PyTypeObject *)kind, consumer, lease);
        Py_DECREF(lease);
        if (!good) {
            Py_CLEAR(groups);
        }
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(groups);
    }
    return groups;
}

/* (extents under a lease's lock, extents under a view's lock), for tests and messages. */
static PyObject *py_borrower_locks(BorrowerObject *self, PyObject *ignored) {
    (void)ignored;
    unsigned int leases = 0, views = 0;
    for (uint32_t i = 0; self->attached && i < self->segment->c.extent_count; i++) {
        leases += self->lease_counts[i] > 0;
        views += self->view_counts[i] > 0;
    }
    return Py_BuildValue("(II)", leases, views);
}

static void py_borrower_detach(BorrowerObject *self) {
    if (self->attached) {
        self->attached = false;
        /* Each refers to this. */
        Py_CLEAR(self->ready);
        /* Views get copies of their own; with the description, all locks go. */
        py_segment_release_handle(self->segment);
    }
}

static PyObject *py_borrower_close(BorrowerObject *self, PyObject *ignored) {
    (void)ignored;
    py_borrower_detach(self);
    Py_RETURN_NONE;
}

static void py_borrower_dealloc(BorrowerObject *self) {
    if (self->segment != NULL) {
        py_borrower_detach(self);
    }
    PyMem_Free(self->lease_counts);
    PyMem_Free(self->view_counts);
    PyMem_Free(self->changed);
    PyMem_Free(self->received);
    Py_XDECREF(self->ready);
    py_holder_clear((HolderObject *)self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef borrower_methods[] = {
    {"set_client", (PyCFunction)(void (*)(void))py_borrower_set_client, METH_O, NULL},
    {"borrow", (PyCFunction)(void (*)(void))py_borrower_borrow, METH_VARARGS, NULL},
    {"receive", (PyCFunction)(void (*)(void))py_borrower_receive, METH_VARARGS, NULL},
    {"look", (PyCFunction)(void (*)(void))py_borrower_look, METH_VARARGS, NULL},
    {"receive_reply", (PyCFunction)(void (*)(void))py_borrower_receive_reply, METH_VARARGS, NULL},
    {"hand_out", (PyCFunction)(void (*)(void))py_borrower_hand_out, METH_VARARGS, NULL},
    {"give_back_group", (PyCFunction)(void (*)(void))py_borrower_give_back_group, METH_VARARGS,
     NULL},
    {"give_back_ready", (PyCFunction)(void (*)(void))py_borrower_give_back_ready, METH_O, NULL},
    {"confirm", (PyCFunction)(void (*)(void))py_borrower_confirm, METH_VARARGS, NULL},
    {"end", (PyCFunction)(void (*)(void))py_borrower_end, METH_VARARGS, NULL},
    {"end_groups", (PyCFunction)(void (*)(void))py_borrower_end_groups, METH_VARARGS, NULL},
    {"forget", (PyCFunction)(void (*)(void))py_borrower_forget, METH_O, NULL},
    {"locks", (PyCFunction)(void (*)(void))py_borrower_locks, METH_NOARGS, NULL},
    {"close", (PyCFunction)(void (*)(void))py_borrower_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef borrower_members[] = {
    {"segment", T_OBJECT_EX, offsetof(BorrowerObject, segment), READONLY, NULL},
    {"client", T_UINT, offsetof(BorrowerObject, client), READONLY, NULL},
    {"attached", T_BOOL, offsetof(BorrowerObject, attached), READONLY, NULL},
    {"packs", T_BOOL, offsetof(BorrowerObject, packs), READONLY, NULL},
    {"ready", T_OBJECT, offsetof(BorrowerObject, ready), READONLY, NULL},
    {"unconfirmed", T_PYSSIZET, offsetof(BorrowerObject, unconfirmed), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject BorrowerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Borrower",
    .tp_basicsize = sizeof(BorrowerObject),
    .tp_dealloc = (destructor)py_borrower_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = borrower_methods,
    .tp_members = borrower_members,
    .tp_init = (initproc)py_borrower_init,
    .tp_new = PyType_GenericNew,
};
