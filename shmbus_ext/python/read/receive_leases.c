/* How what a daemon grants becomes leases of this process: locked, read, known and ready.
 *
 * Invariants:
 *  - The locks come first: what is read behind them cannot be delivered to another any more.
 *  - A lease is locked, known and ready, or nothing of that; no signal's handler runs in between. */
#include "python/read/receive_leases.h"

#include <poll.h>

#include "python/hooks.h"

/* NULL without an exception where the place holds no committed record. */
static TrajectoryObject *borrow_one(BorrowerObject *self, const struct record_ref *ref) {
    const struct record_header *shared =
        (const void *)(segment_extent(&self->segment->c, ref->place.extent) + ref->place.offset);
    struct record_copy *copy = &self->copy;
    if (record_read_frame(shared, ref->bytes, &ref->place, &copy->header) != RECORD_OK ||
        copy->header.record_bytes != ref->bytes ||
        !shmbus_is_committed(atomic_load_explicit(&copy->header.state, memory_order_relaxed)) ||
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
        py_borrower_unlock(self, empty);
    } else {
        PyObject *error = py_set_aside_error();
        py_borrower_unlock(self, leases);
        if (empty != NULL) {
            py_borrower_unlock(self, empty);
        }
        py_restore_error(error);
    }
    Py_XDECREF(empty);
    return good;
}

/* Locks and reads what a message grants: a list of leases; the numbers of those whose places hold no
 * committed records are appended. */
static PyObject *borrow(BorrowerObject *self, PyObject *granted, long long step,
                        PyObject *refused) {
    PyObject *leases = leases_of(self, granted, step, refused);
    /* The locks first: what is read behind them cannot be delivered to another any more. */
    if (leases != NULL && !(py_borrower_lock(self, leases) && read_leases(self, leases, refused))) {
        Py_CLEAR(leases);
    }
    return leases;
}

/* borrow(granted, step) -> (leases, refused). */
PyObject *py_borrower_borrow(BorrowerObject *self, PyObject *args) {
    PyObject *granted;
    long long step;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &granted, &step) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    PyObject *refused = PyList_New(0);
    PyObject *leases = refused == NULL ? NULL : borrow(self, granted, step, refused);
    PyObject *result = leases == NULL ? NULL : PyTuple_Pack(2, leases, refused);
    Py_XDECREF(leases);
    Py_XDECREF(refused);
    return result;
}

/* Whether an end of the connection is closed. */
static bool is_over(int fd) {
    struct pollfd ends = {fd, 0, 0};
    return poll(&ends, 1, 0) > 0;
}

/* Locked leases become known and ready, all or none. */
static bool keep_leases(BorrowerObject *self, PyObject *leases, PyObject *all) {
    Py_ssize_t before = PyList_GET_SIZE(self->ready);
    bool good = PyList_SetSlice(self->ready, before, before, leases) == 0;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(leases); i++) {
        good = py_borrower_note(all, (ClientLeaseObject *)PyList_GET_ITEM(leases, i), true);
    }
    if (!good) {
        PyObject *error = py_set_aside_error();
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
            (void)py_borrower_note(all, (ClientLeaseObject *)PyList_GET_ITEM(leases, i), false);
            PyErr_Clear();
        }
        (void)PyList_SetSlice(self->ready, before, PyList_GET_SIZE(self->ready), NULL);
        py_borrower_unlock(self, leases);
        PyErr_Clear();
        py_restore_error(error);
    }
    return good;
}

/* receive(granted, step, all, fd) -> (leases, refused): as borrow, and the leases are in the
 * dictionary `all` and ready then. None are if the connection `fd` is over: the next daemon may have
 * read the locks before these were there. */
PyObject *py_borrower_receive(BorrowerObject *self, PyObject *args) {
    PyObject *granted, *all;
    long long step;
    int fd;
    if (!PyArg_ParseTuple(args, "O!LO!i", &PyList_Type, &granted, &step, &PyDict_Type, &all,
                          &fd) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    PyObject *refused = PyList_New(0);
    PyObject *leases = refused == NULL ? NULL : borrow(self, granted, step, refused);
    if (leases != NULL && is_over(fd)) {
        py_borrower_unlock(self, leases);
        Py_SETREF(leases, PyList_New(0));
        Py_SETREF(refused, PyList_New(0));
    } else if (leases != NULL && !keep_leases(self, leases, all)) {
        Py_CLEAR(leases);
    }
    PyObject *result = leases == NULL || refused == NULL ? NULL : PyTuple_Pack(2, leases, refused);
    Py_XDECREF(leases);
    Py_XDECREF(refused);
    return result;
}
