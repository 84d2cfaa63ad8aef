/* Borrower: makes the trajectories of groups that a daemon leased to this process. How their leases
 * end is in lease_ends.c.
 *
 * Invariants:
 *  - The segment is mapped read-only; nothing that a message or the segment says is used before it
 *    is bounded and its frame's checksum, which is salted with its place, has been found right.
 *  - Each extent of a lease has this client's lease lock until the lease has ended for good, and
 *    each extent that an array looks into has a view lock. The kernel drops both when the process
 *    dies, and a daemon that dies does not take them with it: they are what the next one believes.
 *  - A view lock is taken while its record is leased, and found by the reader before it frees.
 *  - Locks of either kind are counted by extent; the kernel hears of the first and the last, of
 *    neighbours in one call.
 *  - A lease that was received is in `ready` until it is handed out. Each call changes the locks, the
 *    dictionary of all leases and `ready` together: no signal's handler runs in between. */
#include <errno.h>
#include <poll.h>

#include "ring/extents.h"
#include "ring/file_lock.h"
#include "python/read/take.h"
#include "python/read/borrower.h"

static int64_t lease_bytes(uint32_t client) {
    return SHMBUS_LOCK_LEASE + (int64_t)client * SHMBUS_MAX_EXTENTS;
}

/* Behind the last of extents[from..count), which are in order, that follow each other. */
static size_t end_of_range(const uint32_t *extents, size_t from, size_t count) {
    size_t to = from + 1;
    while (to < count && extents[to] == extents[to - 1] + 1) {
        to++;
    }
    return to;
}

static void unlock_changed(BorrowerObject *self, size_t count, int64_t base) {
    int fd = self->segment->c.fd;
    extents_sort(self->changed, count);
    for (size_t i = 0, end; fd >= 0 && i < count; i = end) {
        end = end_of_range(self->changed, i, count);
        segment_unlock_range(fd, base + self->changed[i], (int64_t)(end - i));
    }
}

/* All, or none and false with an exception. */
static bool lock_changed(BorrowerObject *self, size_t count, int64_t base) {
    extents_sort(self->changed, count);
    for (size_t i = 0, end; i < count; i = end) {
        end = end_of_range(self->changed, i, count);
        if (segment_lock_shared_range(self->segment->c.fd, base + self->changed[i],
                                      (int64_t)(end - i)) != LOCK_TAKEN) {
            int why = errno;
            unlock_changed(self, i, base);
            errno = why;
            PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->segment->name);
            return false;
        }
    }
    return true;
}

/* How many extents have changed, with those that did before: theirs are the first records now. */
static size_t count_up(BorrowerObject *self, uint32_t *counts, const struct record_ref *refs,
                       Py_ssize_t records, size_t changed) {
    for (Py_ssize_t i = 0; i < records; i++) {
        uint32_t extent = refs[i].place.extent;
        if (counts[extent]++ == 0) {
            self->changed[changed++] = extent;
        }
    }
    return changed;
}

/* The same for extents that have none any more. */
static size_t count_down(BorrowerObject *self, uint32_t *counts, const struct record_ref *refs,
                         Py_ssize_t records, size_t changed) {
    for (Py_ssize_t i = 0; i < records; i++) {
        uint32_t extent = refs[i].place.extent;
        if (--counts[extent] == 0) {
            self->changed[changed++] = extent;
        }
    }
    return changed;
}

static bool hold_views(HolderObject *holder, const struct record_ref *refs, Py_ssize_t count) {
    BorrowerObject *self = (BorrowerObject *)holder;
    size_t changed = count_up(self, self->views, refs, count, 0);
    if (!lock_changed(self, changed, SHMBUS_LOCK_VIEW)) {
        (void)count_down(self, self->views, refs, count, 0);
        return false;
    }
    return true;
}

static void let_go_of_views(HolderObject *holder, const struct record_ref *refs,
                            Py_ssize_t count) {
    BorrowerObject *self = (BorrowerObject *)holder;
    unlock_changed(self, count_down(self, self->views, refs, count, 0), SHMBUS_LOCK_VIEW);
}

static const struct holder_kind borrower_kind = {false, hold_views, let_go_of_views};

bool py_borrower_usable(BorrowerObject *self) {
    if (!self->attached) {
        PyErr_SetString(hooks.closed_error, "this Consumer is closed; make a new one");
        return false;
    }
    return py_segment_usable(self->segment, "Consumer");
}

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
    self->leases = PyMem_Calloc(segment->c.extent_count, sizeof *self->leases);
    self->views = PyMem_Calloc(segment->c.extent_count, sizeof *self->views);
    self->changed = PyMem_Calloc(segment->c.extent_count, sizeof *self->changed);
    if (self->leases == NULL || self->views == NULL || self->changed == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->ready = PyList_New(0);
    if (self->ready == NULL) {
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
    size_t changed = 0;
    for (uint32_t i = 0; client != self->client && i < self->segment->c.extent_count; i++) {
        if (self->leases[i] > 0) {
            self->changed[changed++] = i;
        }
    }
    /* The new ones first: at no moment does a lease look like that of a dead client. */
    if (!lock_changed(self, changed, lease_bytes((uint32_t)client))) {
        return NULL;
    }
    unlock_changed(self, changed, lease_bytes(self->client));
    self->client = (uint32_t)client;
    Py_RETURN_NONE;
}

/* The locks of all loans of a list; false with an exception, and none. */
static bool lock_loans(BorrowerObject *self, PyObject *loans) {
    size_t changed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loans); i++) {
        ClientLeaseObject *loan = (ClientLeaseObject *)PyList_GET_ITEM(loans, i);
        changed = count_up(self, self->leases, loan->refs, py_client_lease_records(loan), changed);
        loan->locked = true;
    }
    if (lock_changed(self, changed, lease_bytes(self->client))) {
        return true;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loans); i++) {
        ClientLeaseObject *loan = (ClientLeaseObject *)PyList_GET_ITEM(loans, i);
        (void)count_down(self, self->leases, loan->refs, py_client_lease_records(loan), 0);
        loan->locked = false;
    }
    return false;
}

void py_borrower_unlock(BorrowerObject *self, PyObject *loans) {
    size_t changed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loans); i++) {
        ClientLeaseObject *loan = (ClientLeaseObject *)PyList_GET_ITEM(loans, i);
        if (loan->locked) {
            loan->locked = false;
            self->unconfirmed -= loan->reason != LOAN_HELD;
            changed = count_down(self, self->leases, loan->refs, py_client_lease_records(loan), changed);
        }
    }
    unlock_changed(self, changed, lease_bytes(self->client));
}

/* NULL without an exception where the place holds no committed record. */
static TrajectoryObject *borrow_one(BorrowerObject *self, const struct record_ref *ref) {
    const struct record_header *shared =
        (const void *)(segment_extent(&self->segment->c, ref->place.extent) + ref->place.offset);
    struct record_copy *copy = &self->copy;
    if (record_read_frame(shared, ref->bytes, &ref->place, &copy->header) != RECORD_OK ||
        copy->header.record_bytes != ref->bytes ||
        atomic_load_explicit(&copy->header.state, memory_order_relaxed) != SHMBUS_COMMITTED ||
        record_read_body(shared, copy) != RECORD_OK) {
        return NULL;
    }
    return py_trajectory_new((HolderObject *)self, copy, ref);
}

/* Reads a loan's trajectories; false with an exception, or without one as borrow_one. */
static bool read_loan(BorrowerObject *self, ClientLeaseObject *loan) {
    PyObject *samples = PyList_New(py_client_lease_records(loan));
    for (Py_ssize_t i = 0; samples != NULL && i < py_client_lease_records(loan); i++) {
        PyObject *t = (PyObject *)borrow_one(self, &loan->refs[i]);
        if (t == NULL) {
            Py_CLEAR(samples);
        } else {
            PyList_SET_ITEM(samples, i, t);
        }
    }
    if (samples == NULL) {
        return false;
    }
    loan->samples = samples;
    loan->key = Py_NewRef(((TrajectoryObject *)PyList_GET_ITEM(samples, 0))->key);
    return true;
}

/* A loan for each grant whose places lie in this segment; the numbers of others are refused. */
static PyObject *loans_of(BorrowerObject *self, PyObject *granted, long long step,
                          PyObject *refused) {
    PyObject *loans = PyList_New(0);
    for (Py_ssize_t i = 0; loans != NULL && i < PyList_GET_SIZE(granted); i++) {
        PyObject *item = PyList_GET_ITEM(granted, i);
        PyObject *loan = (PyObject *)py_client_lease_new((HolderObject *)self, item, step);
        PyObject *number = NULL;
        bool good = loan != NULL ? PyList_Append(loans, loan) == 0
                                 : !PyErr_Occurred() &&
                                       (number = PyObject_GetAttrString(item, "number")) != NULL &&
                                       PyList_Append(refused, number) == 0;
        Py_XDECREF(number);
        Py_XDECREF(loan);
        if (!good) {
            Py_CLEAR(loans);
        }
    }
    return loans;
}

/* Takes out of a list of locked loans those that hold no committed records; false with an
 * exception. */
static bool read_loans(BorrowerObject *self, PyObject *loans, PyObject *refused) {
    PyObject *empty = PyList_New(0);
    bool good = empty != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(loans);) {
        ClientLeaseObject *loan = (ClientLeaseObject *)PyList_GET_ITEM(loans, i);
        if (read_loan(self, loan)) {
            i++;
            continue;
        }
        PyObject *number = PyErr_Occurred() ? NULL : PyLong_FromLongLong(loan->number);
        good = number != NULL && PyList_Append(refused, number) == 0 &&
               PyList_Append(empty, (PyObject *)loan) == 0 &&
               PyList_SetSlice(loans, i, i + 1, NULL) == 0;
        Py_XDECREF(number);
    }
    if (good) {
        py_borrower_unlock(self, empty);
    } else {
        PyObject *error = py_set_aside_error();
        py_borrower_unlock(self, loans);
        if (empty != NULL) {
            py_borrower_unlock(self, empty);
        }
        py_restore_error(error);
    }
    Py_XDECREF(empty);
    return good;
}

/* Locks and reads what a message grants: a list of loans; the numbers of those whose places hold no
 * committed records are appended. */
static PyObject *borrow(BorrowerObject *self, PyObject *granted, long long step,
                        PyObject *refused) {
    PyObject *loans = loans_of(self, granted, step, refused);
    /* The locks first: what is read behind them cannot be delivered to another any more. */
    if (loans != NULL && !(lock_loans(self, loans) && read_loans(self, loans, refused))) {
        Py_CLEAR(loans);
    }
    return loans;
}

/* borrow(granted, step) -> (loans, refused). */
static PyObject *py_borrower_borrow(BorrowerObject *self, PyObject *args) {
    PyObject *granted;
    long long step;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &granted, &step) || !py_borrower_usable(self)) {
        return NULL;
    }
    PyObject *refused = PyList_New(0);
    PyObject *loans = refused == NULL ? NULL : borrow(self, granted, step, refused);
    PyObject *result = loans == NULL ? NULL : PyTuple_Pack(2, loans, refused);
    Py_XDECREF(loans);
    Py_XDECREF(refused);
    return result;
}

/* Whether an end of the connection is closed. */
static bool is_over(int fd) {
    struct pollfd ends = {fd, 0, 0};
    return poll(&ends, 1, 0) > 0;
}

bool py_borrower_note(PyObject *leases, ClientLeaseObject *loan, bool known) {
    PyObject *number = PyLong_FromLongLong(loan->number);
    bool good = number != NULL &&
                (known ? PyDict_SetItem(leases, number, (PyObject *)loan) == 0
                       : PyDict_GetItemWithError(leases, number) != (PyObject *)loan ||
                             PyDict_DelItem(leases, number) == 0);
    Py_XDECREF(number);
    return good && !PyErr_Occurred();
}

/* Locked loans become known and ready, all or none. */
static bool keep_loans(BorrowerObject *self, PyObject *loans, PyObject *leases) {
    Py_ssize_t before = PyList_GET_SIZE(self->ready);
    bool good = PyList_SetSlice(self->ready, before, before, loans) == 0;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(loans); i++) {
        good = py_borrower_note(leases, (ClientLeaseObject *)PyList_GET_ITEM(loans, i), true);
    }
    if (!good) {
        PyObject *error = py_set_aside_error();
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loans); i++) {
            (void)py_borrower_note(leases, (ClientLeaseObject *)PyList_GET_ITEM(loans, i), false);
            PyErr_Clear();
        }
        (void)PyList_SetSlice(self->ready, before, PyList_GET_SIZE(self->ready), NULL);
        py_borrower_unlock(self, loans);
        PyErr_Clear();
        py_restore_error(error);
    }
    return good;
}

/* receive(granted, step, leases, fd) -> (loans, refused): as borrow; the loans are in `leases` and
 * ready then. None are where the connection `fd` is over: the next daemon may have read the locks
 * before these were there. */
static PyObject *py_borrower_receive(BorrowerObject *self, PyObject *args) {
    PyObject *granted, *leases;
    long long step;
    int fd;
    if (!PyArg_ParseTuple(args, "O!LO!i", &PyList_Type, &granted, &step, &PyDict_Type, &leases,
                          &fd) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    PyObject *refused = PyList_New(0);
    PyObject *loans = refused == NULL ? NULL : borrow(self, granted, step, refused);
    if (loans != NULL && is_over(fd)) {
        py_borrower_unlock(self, loans);
        Py_SETREF(loans, PyList_New(0));
        Py_SETREF(refused, PyList_New(0));
    } else if (loans != NULL && !keep_loans(self, loans, leases)) {
        Py_CLEAR(loans);
    }
    PyObject *result = loans == NULL || refused == NULL ? NULL : PyTuple_Pack(2, loans, refused);
    Py_XDECREF(loans);
    Py_XDECREF(refused);
    return result;
}

ClientLeaseObject *py_borrower_pop_ready(BorrowerObject *self) {
    while (PyList_GET_SIZE(self->ready) > 0) {
        PyObject *loan = Py_NewRef(PyList_GET_ITEM(self->ready, 0));
        if (PyList_SetSlice(self->ready, 0, 1, NULL) < 0) {
            Py_DECREF(loan);
            return NULL;
        }
        if (!((ClientLeaseObject *)loan)->lost) {
            return (ClientLeaseObject *)loan;
        }
        Py_DECREF(loan);
    }
    return NULL;
}

/* Makes a group of a lease that was ready, and appends it. */
static bool append_group(PyObject *groups, PyTypeObject *kind, PyObject *consumer,
                         ClientLeaseObject *loan) {
    PyObject *group = py_group_new(kind, consumer, (PyObject *)loan);
    if (group == NULL) {
        py_borrower_return(loan);
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
        ClientLeaseObject *loan = py_borrower_pop_ready(self);
        if (loan == NULL) {
            break;
        }
        bool first = PyList_GET_SIZE(groups) == 0;
        step = first ? loan->step : step;
        if (limit < 0 && loan->step != step) {
            py_borrower_return(loan);
            Py_DECREF(loan);
            break;
        }
        bool good = append_group(groups, (PyTypeObject *)kind, consumer, loan);
        Py_DECREF(loan);
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
        leases += self->leases[i] > 0;
        views += self->views[i] > 0;
    }
    return Py_BuildValue("(II)", leases, views);
}

void py_borrower_return(ClientLeaseObject *loan) {
    BorrowerObject *self = (BorrowerObject *)loan->borrower;
    if (!self->attached || loan->lost || !loan->locked || loan->reason != LOAN_HELD) {
        return;
    }
    PyObject *error = py_set_aside_error();
    if (PyList_Insert(self->ready, 0, (PyObject *)loan) < 0) {
        PyErr_Clear(); /* it stays leased, as if its group had been seen */
    }
    if (error != NULL) {
        py_restore_error(error);
    }
}

static void py_borrower_detach(BorrowerObject *self) {
    if (self->attached) {
        self->attached = false;
        /* Each refers to this. */
        Py_CLEAR(self->ready);
        /* Views get copies of their own; with the description, all locks go. */
        py_segment_release_handle(self->segment);
        for (PinObject *p = self->segment->pins; p != NULL; p = p->next) {
            p->reader = NULL;
        }
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
    PyMem_Free(self->leases);
    PyMem_Free(self->views);
    PyMem_Free(self->changed);
    Py_XDECREF(self->ready);
    py_holder_clear((HolderObject *)self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef borrower_methods[] = {
    {"set_client", (PyCFunction)(void (*)(void))py_borrower_set_client, METH_O, NULL},
    {"borrow", (PyCFunction)(void (*)(void))py_borrower_borrow, METH_VARARGS, NULL},
    {"receive", (PyCFunction)(void (*)(void))py_borrower_receive, METH_VARARGS, NULL},
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
    {"gathers", T_BOOL, offsetof(BorrowerObject, gathers), READONLY, NULL},
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
