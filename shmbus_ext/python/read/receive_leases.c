/* How what a daemon grants becomes leases of this process: locked, read, known and ready.
 *
 * Invariants:
 *  - The locks come first: what is read behind them cannot be delivered to another any more.
 *  - A lease is locked, known and ready, or nothing of that; no signal's handler runs in between. A
 *    reply that C takes whole leaves the socket in the same call. */
#include "python/read/receive_leases.h"

#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include "python/hooks.h"
#include "python/read/lease_ends.h"
#include "python/read/plain_reply.h"
#include "base/clock.h"
#include "ring/doorbell.h"

#define NS_PER_MS UINT64_C(1000000)

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

static bool is_readable(int fd) {
    struct pollfd what = {fd, POLLIN, 0};
    return poll(&what, 1, 0) > 0;
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

/* A lease for each group of a reply; NULL with an exception, or without one where places of it do not
 * lie in this segment. */
static PyObject *leases_of_reply(BorrowerObject *self, const struct plain_reply *reply) {
    PyObject *leases = PyList_New(0);
    const uint8_t *at = reply->granted;
    for (uint64_t i = 0; leases != NULL && i < reply->granted_count; i++) {
        struct plain_grant grant;
        at = py_plain_reply_grant(at, reply->end, &grant);
        ClientLeaseObject *lease =
            grant.number > INT64_MAX || grant.size > SHMBUS_MAX_GROUP_SIZE
                ? NULL
                : py_client_lease_of_places((HolderObject *)self, (const char *)grant.places,
                                            (Py_ssize_t)grant.places_bytes);
        if (lease != NULL) {
            lease->number = (long long)grant.number;
            lease->size = (unsigned int)grant.size;
        }
        if (lease == NULL || PyList_Append(leases, (PyObject *)lease) < 0) {
            Py_CLEAR(leases);
        }
        Py_XDECREF(lease);
    }
    return leases;
}

static PyObject *ended_of_reply(const struct plain_reply *reply) {
    PyObject *numbers = PyList_New(0);
    const uint8_t *at = reply->ended;
    for (uint64_t i = 0; numbers != NULL && i < reply->ended_count; i++) {
        uint64_t number;
        at = py_plain_reply_number(at, reply->end, &number);
        PyObject *item = PyLong_FromUnsignedLongLong(number);
        if (item == NULL || PyList_Append(numbers, item) < 0) {
            Py_CLEAR(numbers);
        }
        Py_XDECREF(item);
    }
    return numbers;
}

/* Locks and reads what a reply grants: a list of leases; NULL with an exception, or without one, and
 * without locks, where any of it is refused, or the connection is over. */
static PyObject *borrow_reply(BorrowerObject *self, const struct plain_reply *reply, int fd) {
    PyObject *refused = PyList_New(0);
    PyObject *leases = refused == NULL ? NULL : leases_of_reply(self, reply);
    if (leases != NULL && !(py_borrower_lock(self, leases) && read_leases(self, leases, refused))) {
        Py_CLEAR(leases);
    }
    if (leases != NULL && (PyList_GET_SIZE(refused) > 0 || is_over(fd))) {
        py_borrower_unlock(self, leases);
        Py_CLEAR(leases);
    }
    Py_XDECREF(refused);
    return leases;
}

/* Takes the reply out of the socket; its leases, which are locked, become known and ready, and what
 * it confirms is forgotten. False with an exception: the dialogue has stopped in the middle. */
static bool accept_reply(BorrowerObject *self, const struct plain_reply *reply, int fd,
                         PyObject *leases, PyObject *all) {
    const size_t size = (size_t)(reply->end - self->received);
    PyObject *ended = ended_of_reply(reply);
    if (ended != NULL && recv(fd, self->received, size, MSG_DONTWAIT) != (ssize_t)size) {
        PyErr_SetString(PyExc_RuntimeError, "a reply was taken out of the socket twice");
        Py_CLEAR(ended);
    }
    bool kept = ended != NULL && py_borrower_confirm_all(self, all, ended);
    if (!kept) {
        PyObject *error = py_set_aside_error();
        py_borrower_unlock(self, leases);
        py_restore_error(error);
    } else {
        kept = keep_leases(self, leases, all);
    }
    Py_XDECREF(ended);
    return kept;
}

/* One look: whether there is something to receive, or the connection is over (1), or else nothing
 * complete with the daemon, which sleeps (0); -1 where it is awake. */
static int look_once(const struct bus_header *header, int fd) {
    /* In this order: the daemon replies, and sleeps then. */
    const bool asleep = doorbell_is_asleep(header);
    return is_readable(fd) ? 1 : asleep ? 0 : -1;
}

/* look(fd, awake_s) -> bool | None: whether there is something to receive, or the connection is
 * over. False where there is nothing: the daemon has no group for anybody. Looks for so long while
 * the daemon is awake, and lets it run; None where it is awake still. */
PyObject *py_borrower_look(BorrowerObject *self, PyObject *args) {
    int fd;
    double awake_s;
    if (!PyArg_ParseTuple(args, "id", &fd, &awake_s) || !py_borrower_usable(self)) {
        return NULL;
    }
    /* Its owner keeps it mapped: another thread may close this. */
    SegmentObject *segment = (SegmentObject *)Py_NewRef((PyObject *)self->segment);
    int found = look_once(segment->c.header, fd);
    if (found < 0 && awake_s > 0) {
        Py_BEGIN_ALLOW_THREADS
        const uint64_t until_ns = clock_monotonic_ns() + (uint64_t)(awake_s * 1e9);
        do {
            sched_yield();
            found = look_once(segment->c.header, fd);
        } while (found < 0 && clock_monotonic_ns() < until_ns);
        Py_END_ALLOW_THREADS
    }
    Py_DECREF(segment);
    return found < 0 ? Py_NewRef(Py_None) : PyBool_FromLong(found);
}

/* Whether there is something to receive, or the connection is over, within `timeout_ms`: 1 or 0, or
 * -1 with the exception of a signal's handler. */
static int wait_for_reply(int fd, long long timeout_ms) {
    const uint64_t until_ns = clock_monotonic_ns() + (uint64_t)timeout_ms * NS_PER_MS;
    for (;;) {
        struct pollfd what = {fd, POLLIN, 0};
        int found;
        Py_BEGIN_ALLOW_THREADS
        found = poll(&what, 1, timeout_ms > INT_MAX ? INT_MAX : (int)timeout_ms);
        Py_END_ALLOW_THREADS
        if (found > 0) {
            return 1;
        }
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        const uint64_t now_ns = clock_monotonic_ns();
        if (now_ns >= until_ns) {
            return 0;
        }
        timeout_ms = (long long)((until_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS);
    }
}

/* What receive_reply says of what is there. */
static PyObject *receive_now(BorrowerObject *self, int fd, uint64_t id, PyObject *all) {
    struct plain_reply reply;
    const ssize_t size = self->attached ? recv(fd, self->received, BORROWER_RECEIVED_BYTES,
                                               MSG_PEEK | MSG_DONTWAIT)
                                        : 0;
    if (size <= 0 || !py_plain_reply_find(self->received, (size_t)size, id, &reply)) {
        Py_RETURN_NONE;
    }
    PyObject *leases = borrow_reply(self, &reply, fd), *count = NULL;
    if (leases != NULL && accept_reply(self, &reply, fd, leases, all)) {
        count = PyLong_FromSsize_t(PyList_GET_SIZE(leases));
    } else if (!PyErr_Occurred()) {
        count = Py_NewRef(Py_None);
    }
    Py_XDECREF(leases);
    return count;
}

/* receive_reply(fd, id, timeout_ms, all) -> int | None: waits for something to receive. How many
 * leases are in the dictionary `all` and ready, of the reply to this request; -1 where nothing came.
 * None where something else did, or the reply is not plain, not whole, or not all right: nothing has
 * changed then, and it is left in the socket. The caller is the only one who reads from that. */
PyObject *py_borrower_receive_reply(BorrowerObject *self, PyObject *args) {
    int fd;
    unsigned long long id;
    long long timeout_ms;
    PyObject *all;
    if (!PyArg_ParseTuple(args, "iKLO!", &fd, &id, &timeout_ms, &PyDict_Type, &all) ||
        !py_borrower_usable(self)) {
        return NULL;
    }
    const int woken = wait_for_reply(fd, timeout_ms < 0 ? 0 : timeout_ms);
    if (woken <= 0) {
        return woken < 0 ? NULL : PyLong_FromLong(-1);
    }
    /* No finalizer runs in here that takes groups, too. */
    const int collects = PyGC_Disable();
    PyObject *count = receive_now(self, fd, id, all);
    if (collects) {
        PyGC_Enable();
    }
    return count;
}
