/* How the leases of a daemon's client end: for a reason, by going back, or since the daemon says so.
 *
 * Invariant: group, lease, locks and the dictionary of all leases change in one call; no signal's
 * handler runs in between. */
#include "python/read/lease_ends.h"

#include "python/group/group.h"
#include "python/hooks.h"

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
    if (lease->locked) {
        BorrowerObject *borrower = (BorrowerObject *)lease->borrower;
        borrower->unconfirmed += (reason != LEASE_HELD) - (lease->reason != LEASE_HELD);
    }
    lease->reason = reason;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lease->samples); i++) {
        TrajectoryObject *t = (TrajectoryObject *)PyList_GET_ITEM(lease->samples, i);
        t->released = true;
        Py_CLEAR(t->pin);
    }
}

/* end(lease, reason): ends one that is held, or with LEASE_HELD for a reason gives it back. */
PyObject *py_borrower_end(BorrowerObject *self, PyObject *args) {
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
PyObject *py_borrower_end_groups(BorrowerObject *self, PyObject *args) {
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

/* Of one that is held by its own account: it goes back to the daemon. Its number, or NULL. */
static PyObject *give_back(BorrowerObject *self, ClientLeaseObject *lease, PyObject *all) {
    PyObject *number = PyLong_FromLongLong(lease->number);
    PyObject *alone = number == NULL ? NULL : PyList_New(1);
    if (alone == NULL || !py_borrower_note(all, lease, false)) {
        Py_XDECREF(number);
        Py_XDECREF(alone);
        return NULL;
    }
    PyList_SET_ITEM(alone, 0, Py_NewRef((PyObject *)lease));
    close_lease(lease, LEASE_HELD);
    /* Without locks it is also delivered by a daemon that starts before it was told. */
    py_borrower_unlock(self, alone);
    Py_DECREF(alone);
    return number;
}

/* give_back_group(consumer, group, state, all) -> int or None: forgets the lease of a group, which
 * goes back to the daemon. Its number; None where the group is not this consumer's, or not held. */
PyObject *py_borrower_give_back_group(BorrowerObject *self, PyObject *args) {
    PyObject *consumer, *group, *state, *all;
    if (!PyArg_ParseTuple(args, "OOUO!", &consumer, &group, &state, &PyDict_Type, &all) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    PyObject *held = py_group_lease(group, consumer);
    if (held == NULL || !own_lease(self, held)) {
        Py_RETURN_NONE;
    }
    ClientLeaseObject *lease = (ClientLeaseObject *)held;
    if (lease->reason != LEASE_HELD || lease->lost || !lease->locked) {
        Py_RETURN_NONE;
    }
    PyObject *number = give_back(self, lease, all);
    if (number != NULL) {
        py_group_set_state(group, state);
    }
    return number;
}

/* give_back_ready(all) -> list of int: the same for all that are ready. */
PyObject *py_borrower_give_back_ready(BorrowerObject *self, PyObject *all) {
    if (!PyDict_Check(all)) {
        PyErr_SetString(PyExc_TypeError, "give_back_ready: expected a dict of leases");
        return NULL;
    }
    PyObject *numbers = py_borrower_usable(self) ? PyList_New(0) : NULL;
    ClientLeaseObject *lease;
    while (numbers != NULL && (lease = py_borrower_pop_ready(self)) != NULL) {
        PyObject *number = give_back(self, lease, all);
        if (number == NULL || PyList_Append(numbers, number) < 0) {
            Py_CLEAR(numbers);
        }
        Py_XDECREF(number);
        Py_DECREF(lease);
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(numbers);
    }
    return numbers;
}

bool py_borrower_confirm_all(BorrowerObject *self, PyObject *all, PyObject *numbers) {
    PyObject *over = PyList_New(0);
    bool good = over != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(numbers); i++) {
        PyObject *number = PyList_GET_ITEM(numbers, i);
        PyObject *lease = PyDict_GetItemWithError(all, number);
        if (lease != NULL && own_lease(self, lease) &&
            ((ClientLeaseObject *)lease)->reason != LEASE_HELD) {
            good = PyList_Append(over, lease) == 0 && PyDict_DelItem(all, number) == 0;
        }
        good = good && !PyErr_Occurred();
    }
    if (over != NULL) {
        PyObject *error = good ? NULL : py_set_aside_error();
        py_borrower_unlock(self, over);
        Py_DECREF(over);
        if (!good) {
            py_restore_error(error);
        }
    }
    return good;
}

/* confirm(all, numbers): the daemon has released these. */
PyObject *py_borrower_confirm(BorrowerObject *self, PyObject *args) {
    PyObject *all, *numbers;
    if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &all, &PyList_Type, &numbers) ||
        !py_borrower_usable(self) || !py_borrower_confirm_all(self, all, numbers)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* forget(leases): the daemon has confirmed their end, or they are lost, or given back. */
PyObject *py_borrower_forget(BorrowerObject *self, PyObject *leases) {
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
        py_borrower_unlock(self, leases);
    }
    Py_RETURN_NONE;
}
