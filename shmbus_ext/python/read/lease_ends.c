/* How the leases of a daemon's client end: for a reason, by going back, or since the daemon says so.
 *
 * Invariant: group, lease, locks and the dictionary of all leases change in one call; no signal's
 * handler runs in between. */
#include "python/read/borrower.h"
#include "python/read/take.h"

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
    if (loan->locked) {
        BorrowerObject *borrower = (BorrowerObject *)loan->borrower;
        borrower->unconfirmed += (reason != LOAN_HELD) - (loan->reason != LOAN_HELD);
    }
    loan->reason = reason;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loan->samples); i++) {
        TrajectoryObject *t = (TrajectoryObject *)PyList_GET_ITEM(loan->samples, i);
        t->released = true;
        Py_CLEAR(t->pin);
    }
}

/* end(loan, reason): ends one that is held, or with reason -1 gives it back. */
PyObject *py_borrower_end(BorrowerObject *self, PyObject *args) {
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
        PyObject *lease = py_group_lease(group, consumer);
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
        py_group_set_state(group, state);
        close_loan(loan, reason);
        done++;
    }
    return PyLong_FromSsize_t(done);
}

/* Of one that is held by its own account: others shall have it. Its number, or NULL. */
static PyObject *give_back(BorrowerObject *self, ClientLeaseObject *loan, PyObject *leases) {
    PyObject *number = PyLong_FromLongLong(loan->number);
    PyObject *alone = number == NULL ? NULL : PyList_New(1);
    if (alone == NULL || !py_borrower_note(leases, loan, false)) {
        Py_XDECREF(number);
        Py_XDECREF(alone);
        return NULL;
    }
    PyList_SET_ITEM(alone, 0, Py_NewRef((PyObject *)loan));
    close_loan(loan, LOAN_HELD);
    /* Without locks it is also delivered by a daemon that starts before it was told. */
    py_borrower_unlock(self, alone);
    Py_DECREF(alone);
    return number;
}

/* give_back_group(consumer, group, state, leases) -> int or None: forgets the lease of a group that
 * others shall have. Its number; None where the group is not this consumer's, or not held. */
PyObject *py_borrower_give_back_group(BorrowerObject *self, PyObject *args) {
    PyObject *consumer, *group, *state, *leases;
    if (!PyArg_ParseTuple(args, "OOUO!", &consumer, &group, &state, &PyDict_Type, &leases) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    PyObject *lease = py_group_lease(group, consumer);
    if (lease == NULL || !own_loan(self, lease)) {
        Py_RETURN_NONE;
    }
    ClientLeaseObject *loan = (ClientLeaseObject *)lease;
    if (loan->reason != LOAN_HELD || loan->lost || !loan->locked) {
        Py_RETURN_NONE;
    }
    PyObject *number = give_back(self, loan, leases);
    if (number != NULL) {
        py_group_set_state(group, state);
    }
    return number;
}

/* give_back_ready(leases) -> list of int: the same for all that are ready. */
PyObject *py_borrower_give_back_ready(BorrowerObject *self, PyObject *leases) {
    if (!PyDict_Check(leases)) {
        PyErr_SetString(PyExc_TypeError, "give_back_ready: expected a dict of leases");
        return NULL;
    }
    PyObject *numbers = py_borrower_usable(self) ? PyList_New(0) : NULL;
    ClientLeaseObject *loan;
    while (numbers != NULL && (loan = py_borrower_pop_ready(self)) != NULL) {
        PyObject *number = give_back(self, loan, leases);
        if (number == NULL || PyList_Append(numbers, number) < 0) {
            Py_CLEAR(numbers);
        }
        Py_XDECREF(number);
        Py_DECREF(loan);
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(numbers);
    }
    return numbers;
}

/* confirm(leases, numbers): the daemon has released these: those that have ended are forgotten. A
 * group that was given back is confirmed, too, and is not known any more. */
PyObject *py_borrower_confirm(BorrowerObject *self, PyObject *args) {
    PyObject *leases, *numbers;
    if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &leases, &PyList_Type, &numbers) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    PyObject *over = PyList_New(0);
    bool good = over != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(numbers); i++) {
        PyObject *number = PyList_GET_ITEM(numbers, i);
        PyObject *loan = PyDict_GetItemWithError(leases, number);
        if (loan != NULL && own_loan(self, loan) &&
            ((ClientLeaseObject *)loan)->reason != LOAN_HELD) {
            good = PyList_Append(over, loan) == 0 && PyDict_DelItem(leases, number) == 0;
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
    return good ? Py_NewRef(Py_None) : NULL;
}

/* forget(loans): the daemon has confirmed their end, or they are lost, or given back. */
PyObject *py_borrower_forget(BorrowerObject *self, PyObject *loans) {
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
        py_borrower_unlock(self, loans);
    }
    Py_RETURN_NONE;
}
