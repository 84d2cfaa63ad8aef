/* Borrower: the groups leased by a daemon to this process: received, handed out, ended.
 *
 * Invariants:
 *  - The segment is mapped read-only. Contents of a message or of the segment are used only after a
 *    bounds check and the frame's checksum, salted with the frame's place.
 *  - A received lease is in `ready` until handed out. A call changes the locks, the dictionary of
 *    leases and `ready` together: no signal handler runs in between.
 *  - Locks come first: a record read under its lock can no longer be delivered elsewhere. */
#include "python/read/read.h"

#include <errno.h>
#include <poll.h>

#include "base/file_lock.h"
#include "python/hooks.h"

/* ---- State of a Borrower.
 *
 * Invariants:
 *  - Every extent of a lease carries this client's lease lock until the lease has ended for good,
 *    and every extent under an array carries a view lock. The kernel drops both locks when this
 *    process dies, but not when the daemon dies: the next daemon trusts the locks.
 *  - A view lock is taken while its record is leased, and the reader looks for view locks before
 *    freeing.
 *  - Locks are counted by extent; a system call happens only for the first and the last lock of an
 *    extent, and once for neighbouring extents. */
typedef struct {
    HOLDER_HEAD
    uint32_t client;
    uint32_t *lease_counts; /* records of leases, by extent */
    uint32_t *view_counts;  /* pins and copies under way, by extent */
    uint32_t *changed;      /* extents to lock or unlock, within one call */
    PyObject *ready;        /* list: received but not handed out, the next first */
    Py_ssize_t unconfirmed; /* leases ended here but still locked */
    struct record_copy copy;
} BorrowerObject;

static int64_t lease_bytes(uint32_t client) {
    return SHMBUS_LOCK_LEASE + (int64_t)client * SHMBUS_MAX_EXTENTS;
}

/* End of the run of consecutive extents starting at `from`; extents are sorted. */
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

/* Lock every changed extent, or no extent and false with an exception. */
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

enum count { IN, OUT };

/* Count records in or out; append extents at their first, or last, record to `changed` and return
 * its new length. */
static size_t count_records(BorrowerObject *self, enum count way, uint32_t *counts,
                            const struct record_ref *refs, Py_ssize_t records, size_t changed) {
    for (Py_ssize_t i = 0; i < records; i++) {
        uint32_t extent = refs[i].place.extent;
        if ((way == IN ? counts[extent]++ : --counts[extent]) == 0) {
            self->changed[changed++] = extent;
        }
    }
    return changed;
}

/* Take the view locks of records; hold and let_go of the holder_kind. */
static bool py_borrower_hold_views(HolderObject *holder, const struct record_ref *refs,
                                   Py_ssize_t count) {
    BorrowerObject *self = (BorrowerObject *)holder;
    size_t changed = count_records(self, IN, self->view_counts, refs, count, 0);
    if (!lock_changed(self, changed, SHMBUS_LOCK_VIEW)) {
        (void)count_records(self, OUT, self->view_counts, refs, count, 0);
        return false;
    }
    return true;
}

static void py_borrower_let_go_of_views(HolderObject *holder, const struct record_ref *refs,
                                        Py_ssize_t count) {
    BorrowerObject *self = (BorrowerObject *)holder;
    size_t changed = count_records(self, OUT, self->view_counts, refs, count, 0);
    unlock_changed(self, changed, SHMBUS_LOCK_VIEW);
}

/* Move every lease lock to a different client number; on failure unchanged, false with an
 * exception. */
static bool py_borrower_move_locks(BorrowerObject *self, uint32_t client) {
    size_t changed = 0;
    for (uint32_t i = 0; client != self->client && i < self->segment->c.extent_count; i++) {
        if (self->lease_counts[i] > 0) {
            self->changed[changed++] = i;
        }
    }
    /* Take the new locks first: a lease must never look like a dead client's. */
    if (!lock_changed(self, changed, lease_bytes(client))) {
        return false;
    }
    unlock_changed(self, changed, lease_bytes(self->client));
    self->client = client;
    return true;
}

/* Lock every lease of a list, or no lease and false with an exception. */
static bool py_borrower_lock(BorrowerObject *self, PyObject *leases) {
    size_t changed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        changed = count_records(self, IN, self->lease_counts, lease->refs,
                                py_client_lease_records(lease), changed);
        lease->locked = true;
    }
    if (lock_changed(self, changed, lease_bytes(self->client))) {
        return true;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        (void)count_records(self, OUT, self->lease_counts, lease->refs,
                            py_client_lease_records(lease), 0);
        lease->locked = false;
    }
    return false;
}

/* Unlock leases ended for good or never delivered. */
static void py_borrower_unlock(BorrowerObject *self, PyObject *leases) {
    size_t changed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        if (lease->locked) {
            lease->locked = false;
            self->unconfirmed -= lease->reason != LEASE_HELD;
            changed = count_records(self, OUT, self->lease_counts, lease->refs,
                                    py_client_lease_records(lease), changed);
        }
    }
    unlock_changed(self, changed, lease_bytes(self->client));
}

/* Add a lease to the dictionary by number, or remove the lease. */
static bool py_borrower_note(PyObject *all, ClientLeaseObject *lease, bool known) {
    PyObject *number = PyLong_FromLongLong(lease->number);
    bool good =
        number != NULL && (known ? PyDict_SetItem(all, number, (PyObject *)lease) == 0
                                 : PyDict_GetItemWithError(all, number) != (PyObject *)lease ||
                                       PyDict_DelItem(all, number) == 0);
    Py_XDECREF(number);
    return good && !PyErr_Occurred();
}

/* Pop the next ready lease; NULL without an exception if the list is empty. */
static ClientLeaseObject *py_borrower_pop_ready(BorrowerObject *self) {
    while (PyList_GET_SIZE(self->ready) > 0) {
        PyObject *lease = Py_NewRef(PyList_GET_ITEM(self->ready, 0));
        if (PyList_SetSlice(self->ready, 0, 1, NULL) < 0) {
            Py_DECREF(lease);
            return NULL;
        }
        if (!((ClientLeaseObject *)lease)->lost) {
            return (ClientLeaseObject *)lease;
        }
        Py_DECREF(lease);
    }
    return NULL;
}

/* Make an undelivered lease ready again; keep the current exception. */
static void py_borrower_take_back(HolderObject *holder, PyObject *item) {
    BorrowerObject *self = (BorrowerObject *)holder;
    ClientLeaseObject *lease = (ClientLeaseObject *)item;
    if (!self->attached || lease->lost || !lease->locked || lease->reason != LEASE_HELD) {
        return;
    }
    PyObject *error = py_set_aside_error();
    if (PyList_Insert(self->ready, 0, (PyObject *)lease) < 0) {
        PyErr_Clear(); /* keep the lease, as if its group had been seen */
    }
    if (error != NULL) {
        py_restore_error(error);
    }
}

static const struct holder_kind borrower_kind = {false, py_borrower_hold_views,
                                                 py_borrower_let_go_of_views,
                                                 py_borrower_take_back};

static int py_borrower_init(BorrowerObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", NULL};
    SegmentObject *segment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &SegmentType, &segment)) {
        return -1;
    }
    NEVER(self->segment != NULL, -1);
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
    self->ready = PyList_New(0);
    if (self->ready == NULL) {
        return -1;
    }
    self->attached = true;
    return 0;
}

/* set_client(number): keep the leases' locks under this number from now on. */
static PyObject *py_borrower_set_client(BorrowerObject *self, PyObject *argument) {
    unsigned long client = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !py_holder_usable((HolderObject *)self)) {
        return NULL;
    }
    NEVER(client >= SHMBUS_MAX_CLIENTS, NULL);
    return py_borrower_move_locks(self, (uint32_t)client) ? Py_NewRef(Py_None) : NULL;
}

/* NULL without an exception if the place holds no committed record. */
static TrajectoryObject *borrow_one(BorrowerObject *self, const struct record_ref *ref) {
    const struct record_header *shared =
        (const void *)(segment_extent(&self->segment->c, ref->place.extent) + ref->place.offset);
    struct record_copy *copy = &self->copy;
    if (record_read_frame(shared, ref->bytes, &ref->place, &copy->header) != RECORD_OK ||
        copy->header.record_bytes != ref->bytes ||
        !shmbus_is_committed(RELAXED(copy->header.state)) ||
        record_read_body(shared, copy) != RECORD_OK) {
        return NULL;
    }
    return py_trajectory_new((HolderObject *)self, copy, ref);
}

/* Read a lease's trajectories; false with an exception, or without one like borrow_one. */
static bool read_lease(BorrowerObject *self, ClientLeaseObject *lease) {
    PyObject *samples = PyList_New(py_client_lease_records(lease));
    for (Py_ssize_t i = 0; samples != NULL && i < py_client_lease_records(lease); i++) {
        py_list_set(&samples, i, (PyObject *)borrow_one(self, &lease->refs[i]));
    }
    if (samples == NULL) {
        return false;
    }
    lease->samples = samples;
    lease->key = Py_NewRef(((TrajectoryObject *)PyList_GET_ITEM(samples, 0))->key);
    return true;
}

/* Make a lease per grant with places inside this segment; append the numbers of the remaining
 * grants to `refused`. */
static PyObject *leases_of(BorrowerObject *self, PyObject *granted, long long step,
                          PyObject *refused) {
    PyObject *leases = PyList_New(0);
    for (Py_ssize_t i = 0; leases != NULL && i < PyList_GET_SIZE(granted); i++) {
        PyObject *item = PyList_GET_ITEM(granted, i);
        PyObject *lease = (PyObject *)py_client_lease_new((HolderObject *)self, item, step);
        bool good = lease != NULL ? py_append(leases, lease)
                                  : !PyErr_Occurred() &&
                                        py_append(refused, PyObject_GetAttrString(item, "number"));
        if (!good) {
            Py_CLEAR(leases);
        }
    }
    return leases;
}

/* Remove locked leases without committed records; false with an exception. */
static bool read_leases(BorrowerObject *self, PyObject *leases, PyObject *refused) {
    PyObject *empty = PyList_New(0);
    bool good = empty != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(leases);) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        if (read_lease(self, lease)) {
            i++;
            continue;
        }
        good = !PyErr_Occurred() && py_append(refused, PyLong_FromLongLong(lease->number)) &&
               PyList_Append(empty, (PyObject *)lease) == 0 &&
               PyList_SetSlice(leases, i, i + 1, NULL) == 0;
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

/* Lock and read the grants of a message; append the numbers of grants without records to
 * `refused`. */
static PyObject *borrow(BorrowerObject *self, PyObject *granted, long long step,
                        PyObject *refused) {
    PyObject *leases = leases_of(self, granted, step, refused);
    /* Lock before reading: a locked record can no longer be delivered elsewhere. */
    if (leases != NULL && !(py_borrower_lock(self, leases) && read_leases(self, leases, refused))) {
        Py_CLEAR(leases);
    }
    return leases;
}

/* True if an end of the connection closed. */
static bool is_over(int fd) {
    struct pollfd ends = {fd, 0, 0};
    return poll(&ends, 1, 0) > 0;
}

/* Make locked leases known and ready, all or nothing. */
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

/* receive(granted, step, all, fd) -> (leases, refused): lock, read, enter into the dictionary `all`
 * and make ready. Empty lists if the connection `fd` closed: the next daemon may have read the
 * locks before. */
static PyObject *py_borrower_receive(BorrowerObject *self, PyObject *args) {
    PyObject *granted, *all;
    long long step;
    int fd;
    if (!PyArg_ParseTuple(args, "O!LO!i", &PyList_Type, &granted, &step, &PyDict_Type, &all,
                          &fd) ||
        !py_holder_usable((HolderObject *)self)) {
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

/* Make a group from a ready lease and append the group. */
static bool append_group(PyObject *groups, PyTypeObject *kind, PyObject *consumer,
                         ClientLeaseObject *lease) {
    PyObject *group = py_group_new(kind, consumer, (PyObject *)lease);
    if (group == NULL) {
        py_borrower_take_back(lease->borrower, (PyObject *)lease);
        return false;
    }
    /* A group without a place in the list returns its lease in its deallocation. */
    return py_append(groups, group);
}

/* hand_out(kind, consumer, limit) -> groups, ready longest first; for -1 every group of one
 * step. */
static PyObject *py_borrower_hand_out(BorrowerObject *self, PyObject *args) {
    PyObject *kind, *consumer;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "O!On", &PyType_Type, &kind, &consumer, &limit) ||
        !py_holder_usable((HolderObject *)self)) {
        return NULL;
    }
    NEVER(!PyType_IsSubtype((PyTypeObject *)kind, &GroupBaseType), NULL);
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

static bool own_lease(const BorrowerObject *self, PyObject *item) {
    return Py_IS_TYPE(item, &ClientLeaseType) &&
           ((ClientLeaseObject *)item)->borrower == (const HolderObject *)self;
}

/* The held lease of a consumer's group, borrowed; otherwise NULL without an exception. */
static ClientLeaseObject *held_lease(const BorrowerObject *self, PyObject *group,
                                     PyObject *consumer) {
    PyObject *held = py_group_lease(group, consumer);
    ClientLeaseObject *lease = (ClientLeaseObject *)held;
    return held != NULL && own_lease(self, held) && lease->reason == LEASE_HELD && !lease->lost &&
                   lease->locked
               ? lease
               : NULL;
}

/* Close the lease's trajectories for reading; arrays made before stay valid. */
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

/* end(lease, reason): end a held lease; reason LEASE_HELD gives the lease back. */
static PyObject *py_borrower_end(BorrowerObject *self, PyObject *args) {
    PyObject *lease;
    int reason;
    if (!PyArg_ParseTuple(args, "Oi", &lease, &reason)) {
        return NULL;
    }
    NEVER(!own_lease(self, lease), NULL);
    close_lease((ClientLeaseObject *)lease, reason);
    Py_RETURN_NONE;
}

/* end_groups(consumer, groups, reason, state, numbers) -> int: end the groups' leases in order, up
 * to the first group not held by this consumer. Return their count; append their numbers. */
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
        ClientLeaseObject *lease = held_lease(self, group, consumer);
        if (lease == NULL) {
            break;
        }
        if (!py_append(numbers, PyLong_FromLongLong(lease->number))) {
            return NULL;
        }
        py_group_set_state(group, state);
        close_lease(lease, reason);
        done++;
    }
    return PyLong_FromSsize_t(done);
}

/* Give a held lease back to the daemon; return its number, or NULL. */
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
    /* Without locks a daemon starting before the message also delivers the group. */
    py_borrower_unlock(self, alone);
    Py_DECREF(alone);
    return number;
}

/* give_back_group(consumer, group, state, all) -> int or None: forget a group's lease and return
 * the group to the daemon. The lease's number; None if not held by this consumer. */
static PyObject *py_borrower_give_back_group(BorrowerObject *self, PyObject *args) {
    PyObject *consumer, *group, *state, *all;
    if (!PyArg_ParseTuple(args, "OOUO!", &consumer, &group, &state, &PyDict_Type, &all) ||
        !py_holder_usable((HolderObject *)self)) {
        return NULL;
    }
    ClientLeaseObject *lease = held_lease(self, group, consumer);
    if (lease == NULL) {
        Py_RETURN_NONE;
    }
    PyObject *number = give_back(self, lease, all);
    if (number != NULL) {
        py_group_set_state(group, state);
    }
    return number;
}

/* give_back_ready(all) -> list of int: likewise for every ready lease. */
static PyObject *py_borrower_give_back_ready(BorrowerObject *self, PyObject *all) {
    NEVER(!PyDict_Check(all), NULL);
    PyObject *numbers = py_holder_usable((HolderObject *)self) ? PyList_New(0) : NULL;
    ClientLeaseObject *lease;
    while (numbers != NULL && (lease = py_borrower_pop_ready(self)) != NULL) {
        py_list_add(&numbers, give_back(self, lease, all));
        Py_DECREF(lease);
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(numbers);
    }
    return numbers;
}

/* confirm(all, numbers): forget the ended leases among those released by the daemon. The daemon
 * also confirms returned groups, already unknown here. */
static PyObject *py_borrower_confirm(BorrowerObject *self, PyObject *args) {
    PyObject *all, *numbers;
    if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &all, &PyList_Type, &numbers) ||
        !py_holder_usable((HolderObject *)self)) {
        return NULL;
    }
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
    return good ? Py_NewRef(Py_None) : NULL;
}

/* forget(leases): unlock leases confirmed by the daemon, lost, or given back. */
static PyObject *py_borrower_forget(BorrowerObject *self, PyObject *leases) {
    NEVER(!PyList_Check(leases), NULL);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        NEVER(!own_lease(self, PyList_GET_ITEM(leases, i)), NULL);
    }
    if (self->attached && self->segment->generation == fork_generation) {
        py_borrower_unlock(self, leases);
    }
    Py_RETURN_NONE;
}

static void py_borrower_detach(BorrowerObject *self) {
    if (self->attached) {
        self->attached = false;
        /* Every lease refers to this object. */
        Py_CLEAR(self->ready);
        /* Views get private copies; closing the file description drops the locks. */
        py_segment_release_handle(self->segment);
    }
}

static PyObject *py_borrower_close(BorrowerObject *self, PyObject *Py_UNUSED(ignored)) {
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
    Py_XDECREF(self->ready);
    py_holder_clear((HolderObject *)self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef borrower_methods[] = {
    METHOD("set_client", py_borrower_set_client, METH_O, NULL),
    METHOD("receive", py_borrower_receive, METH_VARARGS, NULL),
    METHOD("hand_out", py_borrower_hand_out, METH_VARARGS, NULL),
    METHOD("give_back_group", py_borrower_give_back_group, METH_VARARGS, NULL),
    METHOD("give_back_ready", py_borrower_give_back_ready, METH_O, NULL),
    METHOD("confirm", py_borrower_confirm, METH_VARARGS, NULL),
    METHOD("end", py_borrower_end, METH_VARARGS, NULL),
    METHOD("end_groups", py_borrower_end_groups, METH_VARARGS, NULL),
    METHOD("forget", py_borrower_forget, METH_O, NULL),
    METHOD("close", py_borrower_close, METH_NOARGS, NULL),
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
    TYPE_BASICS("Borrower", BorrowerObject, py_borrower_dealloc, 0),
    .tp_methods = borrower_methods,
    .tp_members = borrower_members,
    .tp_init = (initproc)py_borrower_init,
    .tp_new = PyType_GenericNew,
};
