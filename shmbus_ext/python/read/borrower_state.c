/* What a Borrower keeps.
 *
 * Invariants:
 *  - Each extent of a lease has this client's lease lock until the lease has ended for good, and
 *    each extent that an array looks into has a view lock. The kernel drops both when the process
 *    dies, and a daemon that dies does not take them with it: they are what the next one believes.
 *  - A view lock is taken while its record is leased, and found by the reader before it frees.
 *  - Locks of either kind are counted by extent; the kernel hears of the first and the last, of
 *    neighbours in one call. */
#include "python/read/read.h"

#include <errno.h>

#include "python/hooks.h"
#include "ring/extents.h"
#include "base/file_lock.h"

bool py_borrower_usable(BorrowerObject *self) {
    if (!self->attached) {
        PyErr_SetString(hooks.closed_error, "this Consumer is closed; make a new one");
        return false;
    }
    return py_segment_usable(self->segment, "Consumer");
}

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

bool py_borrower_hold_views(HolderObject *holder, const struct record_ref *refs,
                            Py_ssize_t count) {
    BorrowerObject *self = (BorrowerObject *)holder;
    size_t changed = count_up(self, self->view_counts, refs, count, 0);
    if (!lock_changed(self, changed, SHMBUS_LOCK_VIEW)) {
        (void)count_down(self, self->view_counts, refs, count, 0);
        return false;
    }
    return true;
}

void py_borrower_let_go_of_views(HolderObject *holder, const struct record_ref *refs,
                                 Py_ssize_t count) {
    BorrowerObject *self = (BorrowerObject *)holder;
    unlock_changed(self, count_down(self, self->view_counts, refs, count, 0), SHMBUS_LOCK_VIEW);
}

bool py_borrower_move_locks(BorrowerObject *self, uint32_t client) {
    size_t changed = 0;
    for (uint32_t i = 0; client != self->client && i < self->segment->c.extent_count; i++) {
        if (self->lease_counts[i] > 0) {
            self->changed[changed++] = i;
        }
    }
    /* The new ones first: at no moment does a lease look like that of a dead client. */
    if (!lock_changed(self, changed, lease_bytes(client))) {
        return false;
    }
    unlock_changed(self, changed, lease_bytes(self->client));
    self->client = client;
    return true;
}

bool py_borrower_lock(BorrowerObject *self, PyObject *leases) {
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

void py_borrower_unlock(BorrowerObject *self, PyObject *leases) {
    size_t changed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leases); i++) {
        ClientLeaseObject *lease = (ClientLeaseObject *)PyList_GET_ITEM(leases, i);
        if (lease->locked) {
            lease->locked = false;
            self->unconfirmed -= lease->reason != LEASE_HELD;
            changed =
                count_down(self, self->lease_counts, lease->refs, py_client_lease_records(lease),
                           changed);
        }
    }
    unlock_changed(self, changed, lease_bytes(self->client));
}

bool py_borrower_note(PyObject *all, ClientLeaseObject *lease, bool known) {
    PyObject *number = PyLong_FromLongLong(lease->number);
    bool good = number != NULL &&
                (known ? PyDict_SetItem(all, number, (PyObject *)lease) == 0
                       : PyDict_GetItemWithError(all, number) != (PyObject *)lease ||
                             PyDict_DelItem(all, number) == 0);
    Py_XDECREF(number);
    return good && !PyErr_Occurred();
}

ClientLeaseObject *py_borrower_pop_ready(BorrowerObject *self) {
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

void py_borrower_take_back(HolderObject *holder, PyObject *item) {
    BorrowerObject *self = (BorrowerObject *)holder;
    ClientLeaseObject *lease = (ClientLeaseObject *)item;
    if (!self->attached || lease->lost || !lease->locked || lease->reason != LEASE_HELD) {
        return;
    }
    PyObject *error = py_set_aside_error();
    if (PyList_Insert(self->ready, 0, (PyObject *)lease) < 0) {
        PyErr_Clear(); /* it stays leased, as if its group had been seen */
    }
    if (error != NULL) {
        py_restore_error(error);
    }
}
