/* The admission table for shmbus.stash.upkeep, the collector's side, and for what others say of it. */
#include "python/requests/lead_functions.h"

#include "python/requests/request_arguments.h"
#include "ring/lead.h"

/* lead_state(segment) -> (limit, held, max_groups, max_versions, a_version): limit 0 for no bound,
 * max_groups 0 and max_versions -1 for none of that kind. */
static PyObject *py_lead_state(PyObject *module, PyObject *object) {
    (void)module;
    SegmentObject *segment;
    if (!py_take_segment(object, &segment)) {
        return NULL;
    }
    const struct lead_table *lead = segment->c.lead;
    return Py_BuildValue("(IIIiK)", atomic_load_explicit(&lead->limit, memory_order_relaxed),
                         lead_held(&segment->c), lead->max_groups, (int)lead->max_versions - 1,
                         (unsigned long long)lead->a_version);
}

/* (segment, id, round, split): the number of the split. */
static bool take_key(PyObject *args, SegmentObject **segment, uint64_t *key) {
    PyObject *object, *round_object;
    const char *id;
    Py_ssize_t id_bytes;
    int64_t round;
    unsigned int split;
    if (!PyArg_ParseTuple(args, "Os#OI", &object, &id, &id_bytes, &round_object, &split) ||
        !py_take_segment(object, segment) || !py_take_round(round_object, &round)) {
        return false;
    }
    *key = lead_key(id, (uint32_t)id_bytes, round, split);
    return true;
}

/* lead_leave(segment, id, round, split) -> bool: the group was delivered, or has ended otherwise. */
static PyObject *py_lead_leave(PyObject *module, PyObject *args) {
    (void)module;
    SegmentObject *segment;
    uint64_t key;
    return take_key(args, &segment, &key) ? PyBool_FromLong(lead_leave(&segment->c, key))
                                                  : NULL;
}

/* lead_knows(segment, id, round, split) -> bool: whether a sample of that group waits for no other. */
static PyObject *py_lead_knows(PyObject *module, PyObject *args) {
    (void)module;
    SegmentObject *segment;
    uint64_t key;
    return take_key(args, &segment, &key) ? PyBool_FromLong(lead_knows(&segment->c, key))
                                                  : NULL;
}

/* lead_key(segment, id, round, split) -> int: the word of that group's row once it is settled. */
static PyObject *py_lead_key(PyObject *module, PyObject *args) {
    (void)module;
    SegmentObject *segment;
    uint64_t key;
    return take_key(args, &segment, &key) ? PyLong_FromUnsignedLongLong(key) : NULL;
}

/* lead_follow(segment, leased, ended): groups that are leased, and those that have ended since the
 * last call; for the collector. */
static PyObject *py_lead_follow(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *object;
    SegmentObject *segment;
    unsigned long long leased, ended;
    if (!PyArg_ParseTuple(args, "OKK", &object, &leased, &ended) ||
        !py_take_segment(object, &segment)) {
        return NULL;
    }
    lead_follow(&segment->c, leased, ended);
    Py_RETURN_NONE;
}

/* lead_settled(segment) -> {row: word} of groups whose first record is committed, or never will be. */
static PyObject *py_lead_settled(PyObject *module, PyObject *object) {
    (void)module;
    SegmentObject *segment;
    if (!py_take_segment(object, &segment)) {
        return NULL;
    }
    PyObject *found = PyDict_New();
    for (uint32_t row = 0; found != NULL && row < SHMBUS_LEAD_ROWS; row++) {
        uint64_t word = lead_settled(&segment->c, row);
        if (word == 0) {
            continue;
        }
        PyObject *key = PyLong_FromUnsignedLong(row);
        PyObject *value = PyLong_FromUnsignedLongLong(word);
        if (key == NULL || value == NULL || PyDict_SetItem(found, key, value) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return found;
}

/* lead_free(segment, row, word): for the collector, of a row whose group is not on the bus. */
static PyObject *py_lead_free(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *object;
    SegmentObject *segment;
    unsigned int row;
    unsigned long long word;
    if (!PyArg_ParseTuple(args, "OIK", &object, &row, &word) ||
        !py_take_segment(object, &segment)) {
        return NULL;
    }
    if (row >= SHMBUS_LEAD_ROWS) {
        PyErr_SetString(PyExc_IndexError, "row: the admission table has no such row");
        return NULL;
    }
    lead_free(&segment->c, row, word);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"lead_state", py_lead_state, METH_O, NULL},
    {"lead_leave", py_lead_leave, METH_VARARGS, NULL},
    {"lead_knows", py_lead_knows, METH_VARARGS, NULL},
    {"lead_key", py_lead_key, METH_VARARGS, NULL},
    {"lead_follow", py_lead_follow, METH_VARARGS, NULL},
    {"lead_settled", py_lead_settled, METH_O, NULL},
    {"lead_free", py_lead_free, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_lead_add_functions(PyObject *module) {
    return PyModule_AddIntConstant(module, "LEAD_ROWS", SHMBUS_LEAD_ROWS) == 0 &&
           PyModule_AddFunctions(module, functions) == 0;
}
