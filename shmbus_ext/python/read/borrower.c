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
#include "python/read/borrower.h"

#include <errno.h>

#include "python/group/client_lease.h"
#include "python/group/group_object.h"
#include "python/hooks.h"
#include "ring/extents.h"
#include "ring/file_lock.h"

typedef struct {
    HOLDER_HEAD
    uint32_t client;
    uint32_t *lease_counts; /* groups' records, by extent */
    uint32_t *view_counts;  /* pins and copies under way, by extent */
    uint32_t *changed;      /* extents that the kernel is to hear of, within one call */
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
    size_t changed = count_up(self, self->view_counts, refs, count, 0);
    if (!lock_changed(self, changed, SHMBUS_LOCK_VIEW)) {
        (void)count_down(self, self->view_counts, refs, count, 0);
        return false;
    }
    return true;
}

static void let_go_of_views(HolderObject *holder, const struct record_ref *refs,
                            Py_ssize_t count) {
    BorrowerObject *self = (BorrowerObject *)holder;
    unlock_changed(self, count_down(self, self->view_counts, refs, count, 0), SHMBUS_LOCK_VIEW);
}

static const struct holder_kind borrower_kind = {false, hold_views, let_go_of_views};

static bool py_borrower_usable(BorrowerObject *self) {
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
    self->lease_counts = PyMem_Calloc(segment->c.extent_count, sizeof *self->lease_counts);
    self->view_counts = PyMem_Calloc(segment->c.extent_count, sizeof *self->view_counts);
    self->changed = PyMem_Calloc(segment->c.extent_count, sizeof *self->changed);
    if (self->lease_counts == NULL || self->view_counts == NULL || self->changed == NULL) {
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
    size_t changed = 0;
    for (uint32_t i = 0; client != self->client && i < self->segment->c.extent_count; i++) {
        if (self->lease_counts[i] > 0) {
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

/* The locks of all leases of a list; false with an exception, and none. */
static bool lock_leases(BorrowerObject *self, PyObject *leases) {
    size_t changed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        changed =
            count_up(self, self->lease_counts, lease->refs, py_client_lease_records(lease),
                     changed);
        lease->locked = true;
    }
    if (lock_changed(self, changed, lease_bytes(self->client))) {
        return true;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        (void)count_down(self, self->lease_counts, lease->refs, py_client_lease_records(lease), 0);
        lease->locked = false;
    }
    return false;
}

/* Of leases that have ended for good, or that were not delivered. */
static void unlock_leases(BorrowerObject *self, PyObject *leases) {
    size_t changed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        if (lease->locked) {
            lease->locked = false;
            changed =
                count_down(self, self->lease_counts, lease->refs, py_client_lease_records(lease),
                           changed);
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

/* Reads a lease's trajectories; false with an exception, or without one as borrow_one. */
static bool read_lease(BorrowerObject *self, ClientLeaseObject *lease) {
    PyObject *samples = PyList_New(py_client_lease_records(lease));
    for (Py_ssize_t i = 0; samples != NULL && i < py_client_lease_records(lease); i++) {
        PyObject *t = (PyObject *)borrow_one(self, &lease->refs[i]);
        if (t == NULL) {
            Py_CLEAR(samples);
        } else {
            PyList_SET_ITEM(samples, i, t);
        }
    }
    if (samples == NULL) {
        return false;
    }
    lease->samples = samples;
    lease->key = Py_NewRef(((TrajectoryObject *)PyList_GET_ITEM(samples, 0))->key);
    return true;
}

/* A lease for each grant whose places lie in this segment; the numbers of others are refused. */
static PyObject *leases_of(BorrowerObject *self, PyObject *granted, long long step,
                           PyObject *refused) {
    PyObject *leases = PyList_New(0);
    for (Py_ssize_t i = 0; leases != NULL && i < PyList_GET_SIZE(granted); i++) {
        PyObject *item = PyList_GET_ITEM(granted, i);
        PyObject *lease = (PyObject *)py_client_lease_new((HolderObject *)self, item, step);
        PyObject *number = NULL;
        bool good = lease != NULL ? PyList_Append(leases, lease) == 0
                                 : !PyErr_Occurred() &&
                                       (number = PyObject_GetAttrString(item, "number")) != NULL &&
                                       PyList_Append(refused, number) == 0;
        Py_XDECREF(number);
        Py_XDECREF(lease);
        if (!good) {
            Py_CLEAR(leases);
        }
    }
    return leases;
}

/* Takes out of a list of locked leases those that hold no committed records; false with an
 * exception. */
static bool read_leases(BorrowerObject *self, PyObject *leases, PyObject *refused) {
    PyObject *empty = PyList_New(0);
    bool good = empty != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(leases);) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        if (read_lease(self, lease)) {
            i++;
            continue;
        }
        PyObject *number = PyErr_Occurred() ? NULL : PyLong_FromLongLong(lease->number);
        good = number != NULL && PyList_Append(refused, number) == 0 &&
               PyList_Append(empty, (PyObject *)lease) == 0 &&
               PyList_SetSlice(leases, i, i + 1, NULL) == 0;
        Py_XDECREF(number);
    }
    if (good) {
        unlock_leases(self, empty);
    } else {
        PyObject *error = py_set_aside_error();
        unlock_leases(self, leases);
        if (empty != NULL) {
            unlock_leases(self, empty);
        }
        py_restore_error(error);
    }
    Py_XDECREF(empty);
    return good;
}

/* borrow(granted, step) -> (leases, refused): of what a message grants; the numbers of those whose
 * places hold no committed records. */
static PyObject *py_borrower_borrow(BorrowerObject *self, PyObject *args) {
    PyObject *granted, *refused = NULL, *leases = NULL, *result = NULL;
    long long step;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &granted, &step) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    refused = PyList_New(0);
    leases = refused == NULL ? NULL : leases_of(self, granted, step, refused);
    /* The locks first: what is read behind them cannot be delivered to another any more. */
    if (leases != NULL && lock_leases(self, leases) && read_leases(self, leases, refused)) {
        result = PyTuple_Pack(2, leases, refused);
    }
    Py_XDECREF(leases);
    Py_XDECREF(refused);
    return result;
}

static bool own_lease(const BorrowerObject *self, PyObject *item) {
    return Py_IS_TYPE(item, &ClientLeaseType) &&
           ((ClientLeaseObject *)item)->borrower == (const HolderObject *)self;
}

static bool require_lease(const BorrowerObject *self, PyObject *item) {
    if (!own_lease(self, item)) {
        PyErr_Format(PyExc_TypeError, "expected a lease of this Consumer, got %s",
                     Py_TYPE(item)->tp_name);
        return false;
    }
    return true;
}

/* Its trajectories cannot be read any more; arrays made of them before stay valid. */
static void close_lease(ClientLeaseObject *lease, int reason) {
    lease->reason = reason;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lease->samples); i++) {
        TrajectoryObject *t = (TrajectoryObject *)PyList_GET_ITEM(lease->samples, i);
        t->released = true;
        Py_CLEAR(t->pin);
    }
}

/* end(lease, reason): ends one that is held, or with LEASE_HELD for a reason gives it back. */
static PyObject *py_borrower_end(BorrowerObject *self, PyObject *args) {
    PyObject *lease;
    int reason;
    if (!PyArg_ParseTuple(args, "Oi", &lease, &reason) || !require_lease(self, lease)) {
        return NULL;
    }
    close_lease((ClientLeaseObject *)lease, reason);
    Py_RETURN_NONE;
}

/* end_groups(consumer, groups, reason, state, numbers) -> int: ends the leases of groups from the
 * first on, until one is not this consumer's, or not held. How many; their numbers are appended. */
static PyObject *py_borrower_end_groups(BorrowerObject *self, PyObject *args) {
    PyObject *consumer, *groups, *state, *numbers;
    int reason;
    if (!PyArg_ParseTuple(args, "OO!iUO!", &consumer, &PyList_Type, &groups, &reason, &state,
                          &PyList_Type, &numbers)) {
        return NULL;
    }
    Py_ssize_t done = 0;
    while (done < PyList_GET_SIZE(groups)) {
        PyObject *group = PyList_GET_ITEM(groups, done);
        PyObject *held = py_group_lease(group, consumer);
        if (held == NULL || !own_lease(self, held)) {
            break;
        }
        ClientLeaseObject *lease = (ClientLeaseObject *)held;
        if (lease->reason != LEASE_HELD || lease->lost || !lease->locked) {
            break;
        }
        PyObject *number = PyLong_FromLongLong(lease->number);
        if (number == NULL || PyList_Append(numbers, number) < 0) {
            Py_XDECREF(number);
            return NULL;
        }
        Py_DECREF(number);
        py_group_set_state(group, state);
        close_lease(lease, reason);
        done++;
    }
    return PyLong_FromSsize_t(done);
}

/* forget(leases): the daemon has confirmed their end, or they are lost, or given back. */
static PyObject *py_borrower_forget(BorrowerObject *self, PyObject *leases) {
    if (!PyList_Check(leases)) {
        PyErr_SetString(PyExc_TypeError, "forget: expected a list of leases");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        if (!require_lease(self, PyList_GET_ITEM(leases, i))) {
            return NULL;
        }
    }
    if (self->attached && self->segment->generation == fork_generation) {
        unlock_leases(self, leases);
    }
    Py_RETURN_NONE;
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
    py_holder_clear((HolderObject *)self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef borrower_methods[] = {
    {"set_client", (PyCFunction)(void (*)(void))py_borrower_set_client, METH_O, NULL},
    {"borrow", (PyCFunction)(void (*)(void))py_borrower_borrow, METH_VARARGS, NULL},
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
