/* What ends a lease: records are released in the ring, entries leave their table, and groups get
 * their new state, all of it in one call.
 *
 * Invariant: between the first and the last of these steps no code of Python's runs, so no signal's
 * handler does, and a lease that ends has ended for all three. */
#include "python/read/end_lease.h"

#include "python/group/group_object.h"
#include "ring/doorbell.h"
#include "ring/intent_log.h"
#include "ring/reclaim.h"

/* Whether all of them are this reader's and not released; false with an exception. */
static bool can_release(ReaderObject *self, PyObject *items) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        TrajectoryObject *t = py_reader_own_trajectory(self, PyList_GET_ITEM(items, i));
        if (t == NULL) {
            return false;
        }
        if (t->released) {
            PyErr_Format(PyExc_ValueError, "trajectory %R[%S] was released before",
                         t->instance_id, t->index);
            return false;
        }
    }
    return true;
}

/* Ends them atomically; false with an exception, and then none. */
static bool release(ReaderObject *self, PyObject *items, int reason) {
    Py_ssize_t count = PyList_GET_SIZE(items);
    const struct record_ref *few[64];
    const struct record_ref **refs =
        count <= 64 ? few : PyMem_Malloc((size_t)count * sizeof *refs);
    if (refs == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        refs[i] = &((TrajectoryObject *)PyList_GET_ITEM(items, i))->ref;
    }
    if (count > 0) {
        intent_log_release(self->c.segment, refs, (uint32_t)count, (enum shmbus_reason)reason);
    }
    if (refs != few) {
        PyMem_Free((void *)refs);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        TrajectoryObject *t = (TrajectoryObject *)PyList_GET_ITEM(items, i);
        t->released = true;
        t->held = false;
        if (t->pin != NULL) {
            Py_CLEAR(t->pin);
        } else {
            reader_let_go(&self->c, &t->ref);
        }
    }
    return true;
}

static bool is_reason(int reason) {
    if (reason < 0 || reason >= SHMBUS_REASONS) {
        PyErr_Format(PyExc_ValueError, "release: expected a reason of 0 to %d, got %d",
                     SHMBUS_REASONS - 1, reason);
        return false;
    }
    return true;
}

/* release(trajectories, reason): ends them atomically; their space is free once no view is left. */
PyObject *py_reader_release(ReaderObject *self, PyObject *args) {
    PyObject *items;
    int reason;
    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &items, &reason) || !py_reader_usable(self) ||
        !is_reason(reason)) {
        return NULL;
    }
    if (PyList_GET_SIZE(items) > (Py_ssize_t)SHMBUS_MAX_GROUP_SIZE) {
        PyErr_Format(PyExc_ValueError, "release: expected at most %u trajectories, got %zd",
                     SHMBUS_MAX_GROUP_SIZE, PyList_GET_SIZE(items));
        return NULL;
    }
    if (!can_release(self, items) || !release(self, items, reason)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The entry of a group that this consumer holds under lease by this table, borrowed; NULL, without
 * an exception, of anything else. */
static GroupEntryObject *entry_of(PyObject *group, PyObject *consumer,
                                  const GroupTableObject *table) {
    PyObject *lease = py_group_lease(group, consumer);
    return lease != NULL && py_group_lists_have_leased(&table->lists, lease)
               ? (GroupEntryObject *)lease
               : NULL;
}

/* end_groups(table, consumer, groups, reason, state) -> int: ends the leases of groups from the first
 * on, until one is not this consumer's, or not held. How many. Each is ended in the ring, in the
 * table and by its own account in one step, which nothing can interrupt. */
PyObject *py_reader_end_groups(ReaderObject *self, PyObject *args) {
    PyObject *table, *consumer, *groups, *state;
    int reason;
    if (!PyArg_ParseTuple(args, "O!OO!iU", &GroupTableType, &table, &consumer, &PyList_Type,
                          &groups, &reason, &state) ||
        !py_reader_usable(self) || !is_reason(reason)) {
        return NULL;
    }
    Py_ssize_t done = 0;
    for (; done < PyList_GET_SIZE(groups); done++) {
        PyObject *group = PyList_GET_ITEM(groups, done);
        GroupEntryObject *entry = entry_of(group, consumer, (GroupTableObject *)table);
        if (entry == NULL) {
            break;
        }
        if (!can_release(self, entry->samples) || !release(self, entry->samples, reason)) {
            return NULL;
        }
        py_group_entry_end(entry);
        py_group_set_state(group, state);
    }
    return PyLong_FromSsize_t(done);
}

/* give_back_group(table, consumer, group, state) -> bool: makes it the next to be leased, as
 * end_groups ends it; False of one that is not this consumer's, or not held. */
PyObject *py_reader_give_back_group(ReaderObject *self, PyObject *args) {
    PyObject *table, *consumer, *group, *state;
    if (!PyArg_ParseTuple(args, "O!OOU", &GroupTableType, &table, &consumer, &group, &state) ||
        !py_reader_usable(self)) {
        return NULL;
    }
    GroupEntryObject *entry = entry_of(group, consumer, (GroupTableObject *)table);
    if (entry == NULL) {
        Py_RETURN_FALSE;
    }
    py_group_entry_give_back(entry);
    py_group_set_state(group, state);
    /* Also to who sleeps in take. */
    doorbell_ring(self->segment->c.header);
    Py_RETURN_TRUE;
}
