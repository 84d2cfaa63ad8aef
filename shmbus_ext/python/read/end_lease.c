/* What ends a lease: records are released in the ring, entries leave their table, and groups get
 * their new state, all of it in one call.
 *
 * Invariant: between the first and the last of these steps no code of Python's runs, so no signal's
 * handler does, and a lease that ends has ended for all three. */
#include "python/read/end_lease.h"

#include "python/group/group.h"
#include "python/read/reader_object.h"
#include "ring/doorbell.h"

/* The entry of a group that this consumer holds under lease by this table, borrowed; NULL, without
 * an exception, of anything else. */
static GroupEntryObject *entry_of(PyObject *group, PyObject *consumer,
                                  const GroupTableObject *table) {
    PyObject *lease = py_group_lease(group, consumer);
    return lease != NULL && py_group_lists_have_leased(&table->lists, lease)
               ? (GroupEntryObject *)lease
               : NULL;
}

/* end_groups(reader, table, consumer, groups, reason, state) -> int: ends the leases of groups from the first
 * on, until one is not this consumer's, or not held. How many. Each is ended in the ring, in the
 * table and by its own account in one step, which nothing can interrupt. */
static PyObject *py_end_groups(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *reader, *table, *consumer, *groups, *state;
    int reason;
    if (!PyArg_ParseTuple(args, "O!O!OO!iU", &ReaderType, &reader, &GroupTableType, &table,
                          &consumer, &PyList_Type, &groups, &reason, &state) ||
        !py_reader_usable((ReaderObject *)reader)) {
        return NULL;
    }
    Py_ssize_t done = 0;
    for (; done < PyList_GET_SIZE(groups); done++) {
        PyObject *group = PyList_GET_ITEM(groups, done);
        GroupEntryObject *entry = entry_of(group, consumer, (GroupTableObject *)table);
        if (entry == NULL) {
            break;
        }
        if (!py_reader_release_all((ReaderObject *)reader, entry->samples, reason)) {
            return NULL;
        }
        py_group_entry_end(entry);
        py_group_set_state(group, state);
    }
    return PyLong_FromSsize_t(done);
}

/* give_back_group(reader, table, consumer, group, state) -> bool: makes it the next to be leased, as
 * end_groups ends it; False of one that is not this consumer's, or not held. */
static PyObject *py_give_back_group(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *reader, *table, *consumer, *group, *state;
    if (!PyArg_ParseTuple(args, "O!O!OOU", &ReaderType, &reader, &GroupTableType, &table,
                          &consumer, &group, &state) ||
        !py_reader_usable((ReaderObject *)reader)) {
        return NULL;
    }
    GroupEntryObject *entry = entry_of(group, consumer, (GroupTableObject *)table);
    if (entry == NULL) {
        Py_RETURN_FALSE;
    }
    py_group_entry_give_back(entry);
    py_group_set_state(group, state);
    /* Also to who sleeps in take. */
    doorbell_ring(((ReaderObject *)reader)->segment->c.header);
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {
    {"end_groups", py_end_groups, METH_VARARGS, NULL},
    {"give_back_group", py_give_back_group, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_end_lease_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
