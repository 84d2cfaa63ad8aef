/* Borrower: makes the trajectories of groups that a daemon leased to this process.
 *
 * Invariants:
 *  - The segment is mapped read-only; nothing that a message or the segment says is used before it
 *    is bounded and its frame's checksum, which is salted with its place, has been found right.
 *  - Each extent of a lease has this client's lease lock until the lease has ended for good, and
 *    each extent that an array looks into has a view lock. The kernel drops both when the process
 *    dies, and a daemon that dies does not take them with it: they are what the next one believes.
 *  - A view lock is taken while its record is leased, and found by the reader before it frees.
 *  - Locks of either kind are counted by extent; the kernel hears of the first and the last, of
 *    neighbours in one call. */
#include <errno.h>

#include "ring/extents.h"
#include "ring/file_lock.h"
#include "take.h"
#include "client_lease.h"

typedef struct {
    HOLDER_HEAD
    uint32_t client;
    uint32_t *leases;  /* groups' records, by extent */
    uint32_t *views;   /* pins and copies under way, by extent */
    uint32_t *changed; /* extents that the kernel is to hear of, within one call */
    struct record_copy copy;
} BorrowerObject;

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
        file_lock_drop_range(fd, base + self->changed[i], (int64_t)(end - i));
    }
}

/* All, or none and false with an exception. */
static bool lock_changed(BorrowerObject *self, size_t count, int64_t base) {
    extents_sort(self->changed, count);
    for (size_t i = 0, end; i < count; i = end) {
        end = end_of_range(self->changed, i, count);
        if (file_lock_share_range(self->segment->c.fd, base + self->changed[i],
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

static bool borrower_usable(BorrowerObject *self) {
    if (!self->attached) {
        PyErr_SetString(hooks.closed_error, "this Consumer is closed; make a new one");
        return false;
    }
    return segment_usable(self->segment, "Consumer");
}

static int borrower_init(BorrowerObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", NULL};
    SegmentObject *segment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &SegmentType, &segment)) {
        return -1;
    }
    if (self->segment != NULL) {
        PyErr_SetString(PyExc_TypeError, "this borrower is initialised already");
        return -1;
    }
    if (!holder_init((HolderObject *)self, segment, &borrower_kind) ||
        !segment_usable(segment, "handle")) {
        return -1;
    }
    self->leases = PyMem_Calloc(segment->c.extent_count, sizeof *self->leases);
    self->views = PyMem_Calloc(segment->c.extent_count, sizeof *self->views);
    self->changed = PyMem_Calloc(segment->c.extent_count, sizeof *self->changed);
    if (self->leases == NULL || self->views == NULL || self->changed == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->attached = true;
    return 0;
}

/* set_client(number): the leases' locks are under this number from now on. */
static PyObject *borrower_set_client(BorrowerObject *self, PyObject *argument) {
    unsigned long client = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !borrower_usable(self)) {
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
        changed = count_up(self, self->leases, loan->refs, loan_records(loan), changed);
        loan->locked = true;
    }
    if (lock_changed(self, changed, lease_bytes(self->client))) {
        return true;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loans); i++) {
        ClientLeaseObject *loan = (ClientLeaseObject *)PyList_GET_ITEM(loans, i);
        (void)count_down(self, self->leases, loan->refs, loan_records(loan), 0);
        loan->locked = false;
    }
    return false;
}

/* Of loans that have ended for good, or that nobody was given. */
static void unlock_loans(BorrowerObject *self, PyObject *loans) {
    size_t changed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loans); i++) {
        ClientLeaseObject *loan = (ClientLeaseObject *)PyList_GET_ITEM(loans, i);
        if (loan->locked) {
            loan->locked = false;
            changed = count_down(self, self->leases, loan->refs, loan_records(loan), changed);
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
    return trajectory_new((HolderObject *)self, copy, ref);
}

/* Reads a loan's trajectories; false with an exception, or without one as borrow_one. */
static bool read_loan(BorrowerObject *self, ClientLeaseObject *loan) {
    PyObject *samples = PyList_New(loan_records(loan));
    for (Py_ssize_t i = 0; samples != NULL && i < loan_records(loan); i++) {
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
        PyObject *loan = (PyObject *)loan_new((HolderObject *)self, item, step);
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
        unlock_loans(self, empty);
    } else {
        PyObject *error = set_aside_error();
        unlock_loans(self, loans);
        if (empty != NULL) {
            unlock_loans(self, empty);
        }
        restore_error(error);
    }
    Py_XDECREF(empty);
    return good;
}

/* borrow(granted, step) -> (loans, refused): of what a message grants; the numbers of those whose
 * places hold no committed records. */
static PyObject *borrower_borrow(BorrowerObject *self, PyObject *args) {
    PyObject *granted, *refused = NULL, *loans = NULL, *result = NULL;
    long long step;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &granted, &step) || !borrower_usable(self)) {
        return NULL;
    }
    refused = PyList_New(0);
    loans = refused == NULL ? NULL : loans_of(self, granted, step, refused);
    /* The locks first: what is read behind them cannot be delivered to another any more. */
    if (loans != NULL && lock_loans(self, loans) && read_loans(self, loans, refused)) {
        result = PyTuple_Pack(2, loans, refused);
    }
    Py_XDECREF(loans);
    Py_XDECREF(refused);
    return result;
}

static bool own_loan(const BorrowerObject *self, PyObject *item) {
    return Py_IS_TYPE(item, &ClientLeaseType) &&
           ((ClientLeaseObject *)item)->borrower == (const HolderObject *)self;
}

static bool require_loan(const BorrowerObject *self, PyObject *item) {
    if (!own_loan(self, item)) {
        PyErr_Format(PyExc_TypeError, "expected a loan of this Consumer, got %s",
                     Py_TYPE(item)->tp_name);
        return false;
    }
    return true;
}

/* Its trajectories cannot be read any more; arrays made of them before stay valid. */
static void close_loan(ClientLeaseObject *loan, int reason) {
    loan->reason = reason;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loan->samples); i++) {
        TrajectoryObject *t = (TrajectoryObject *)PyList_GET_ITEM(loan->samples, i);
        t->released = true;
        Py_CLEAR(t->pin);
    }
}

/* end(loan, reason): ends one that is held, or with reason -1 gives it back. */
static PyObject *borrower_py_end(BorrowerObject *self, PyObject *args) {
    PyObject *loan;
    int reason;
    if (!PyArg_ParseTuple(args, "Oi", &loan, &reason) || !require_loan(self, loan)) {
        return NULL;
    }
    close_loan((ClientLeaseObject *)loan, reason);
    Py_RETURN_NONE;
}

/* end_groups(consumer, groups, reason, state, numbers) -> int: ends the leases of groups from the
 * first on, until one is not this consumer's, or not held. How many; their numbers are appended. */
static PyObject *borrower_end_groups(BorrowerObject *self, PyObject *args) {
    PyObject *consumer, *groups, *state, *numbers;
    int reason;
    if (!PyArg_ParseTuple(args, "OO!iUO!", &consumer, &PyList_Type, &groups, &reason, &state,
                          &PyList_Type, &numbers)) {
        return NULL;
    }
    Py_ssize_t done = 0;
    while (done < PyList_GET_SIZE(groups)) {
        PyObject *group = PyList_GET_ITEM(groups, done);
        PyObject *lease = group_lease(group, consumer);
        if (lease == NULL || !own_loan(self, lease)) {
            break;
        }
        ClientLeaseObject *loan = (ClientLeaseObject *)lease;
        if (loan->reason != LOAN_HELD || loan->lost || !loan->locked) {
            break;
        }
        PyObject *number = PyLong_FromLongLong(loan->number);
        if (number == NULL || PyList_Append(numbers, number) < 0) {
            Py_XDECREF(number);
            return NULL;
        }
        Py_DECREF(number);
        group_set_state(group, state);
        close_loan(loan, reason);
        done++;
    }
    return PyLong_FromSsize_t(done);
}

/* forget(loans): the daemon has confirmed their end, or they are lost, or given back. */
static PyObject *borrower_forget(BorrowerObject *self, PyObject *loans) {
    if (!PyList_Check(loans)) {
        PyErr_SetString(PyExc_TypeError, "forget: expected a list of loans");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loans); i++) {
        if (!require_loan(self, PyList_GET_ITEM(loans, i))) {
            return NULL;
        }
    }
    if (self->attached && self->segment->generation == fork_generation) {
        unlock_loans(self, loans);
    }
    Py_RETURN_NONE;
}

/* (extents under a lease's lock, extents under a view's lock), for tests and messages. */
static PyObject *borrower_locks(BorrowerObject *self, PyObject *ignored) {
    (void)ignored;
    unsigned int leases = 0, views = 0;
    for (uint32_t i = 0; self->attached && i < self->segment->c.extent_count; i++) {
        leases += self->leases[i] > 0;
        views += self->views[i] > 0;
    }
    return Py_BuildValue("(II)", leases, views);
}

static void borrower_end(BorrowerObject *self) {
    if (self->attached) {
        self->attached = false;
        /* Views get copies of their own; with the description, all locks go. */
        segment_release_handle(self->segment);
        for (PinObject *p = self->segment->pins; p != NULL; p = p->next) {
            p->reader = NULL;
        }
    }
}

static PyObject *borrower_close(BorrowerObject *self, PyObject *ignored) {
    (void)ignored;
    borrower_end(self);
    Py_RETURN_NONE;
}

static void borrower_dealloc(BorrowerObject *self) {
    if (self->segment != NULL) {
        borrower_end(self);
    }
    PyMem_Free(self->leases);
    PyMem_Free(self->views);
    PyMem_Free(self->changed);
    holder_clear((HolderObject *)self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef borrower_methods[] = {
    {"set_client", (PyCFunction)(void (*)(void))borrower_set_client, METH_O, NULL},
    {"borrow", (PyCFunction)(void (*)(void))borrower_borrow, METH_VARARGS, NULL},
    {"end", (PyCFunction)(void (*)(void))borrower_py_end, METH_VARARGS, NULL},
    {"end_groups", (PyCFunction)(void (*)(void))borrower_end_groups, METH_VARARGS, NULL},
    {"forget", (PyCFunction)(void (*)(void))borrower_forget, METH_O, NULL},
    {"locks", (PyCFunction)(void (*)(void))borrower_locks, METH_NOARGS, NULL},
    {"close", (PyCFunction)(void (*)(void))borrower_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef borrower_members[] = {
    {"segment", T_OBJECT_EX, offsetof(BorrowerObject, segment), READONLY, NULL},
    {"client", T_UINT, offsetof(BorrowerObject, client), READONLY, NULL},
    {"attached", T_BOOL, offsetof(BorrowerObject, attached), READONLY, NULL},
    {"gathers", T_BOOL, offsetof(BorrowerObject, gathers), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject BorrowerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Borrower",
    .tp_basicsize = sizeof(BorrowerObject),
    .tp_dealloc = (destructor)borrower_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = borrower_methods,
    .tp_members = borrower_members,
    .tp_init = (initproc)borrower_init,
    .tp_new = PyType_GenericNew,
};
