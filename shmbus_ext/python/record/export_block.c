/* export_block, record_checks and record_origins: records of a reader as a block, what tells their
 * heads, and what tells them among all buses.
 *
 * Invariant: each trajectory is under lease while its bytes are read: the interpreter lock is held
 * from the check to the copy. */
#include "python/record/export_block.h"

#include "python/record/trajectory.h"
#include "ring/block.h"
#include "ring/origin.h"

/* A trajectory that can be read; NULL with an exception. */
static TrajectoryObject *readable(PyObject *item) {
    if (!Py_IS_TYPE(item, &TrajectoryType)) {
        PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                     Py_TYPE(item)->tp_name);
        return NULL;
    }
    TrajectoryObject *t = (TrajectoryObject *)item;
    return py_trajectory_readable(t) ? t : NULL;
}

static void raise_changed(const TrajectoryObject *t) {
    PyErr_Format(PyExc_ValueError,
                 "trajectory %R[%S]: its record in bus '%U' has changed since it was read; "
                 "`shmbus inspect` shows where it is damaged",
                 t->instance_id, t->index, t->holder->segment->name);
}

static bool add_all(struct block_maker *maker, PyObject *items) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        TrajectoryObject *t = readable(PyList_GET_ITEM(items, i));
        if (t == NULL) {
            return false;
        }
        struct record_header head;
        memcpy(&head, py_trajectory_bytes(t), sizeof head);
        if (head.split != SHMBUS_SPLIT_TRAIN) {
            PyErr_Format(PyExc_ValueError,
                         "trajectory %R[%S] is of split number %u of bus '%U'; a block carries what "
                         "is trained on: leave it on its own bus, or release it",
                         t->instance_id, t->index, head.split, t->holder->segment->name);
            return false;
        }
        if (maker->room - maker->used < t->ref.bytes) {
            PyErr_Format(PyExc_ValueError,
                         "block: %zd records need more than the %llu bytes that there are; export "
                         "fewer of them",
                         PyList_GET_SIZE(items), (unsigned long long)maker->room);
            return false;
        }
        if (!block_add(maker, py_trajectory_bytes(t), t->ref.bytes)) {
            raise_changed(t);
            return false;
        }
    }
    return true;
}

/* export_block(trajectories, into) -> int: how many bytes of `into` the block takes. All of one
 * bus. */
static PyObject *py_export_block(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items;
    Py_buffer into;
    if (!PyArg_ParseTuple(args, "O!w*", &PyList_Type, &items, &into)) {
        return NULL;
    }
    struct block_maker maker;
    PyObject *result = NULL;
    const Py_ssize_t count = PyList_GET_SIZE(items);
    if (count < 1 || count > (Py_ssize_t)BLOCK_MAX_RECORDS) {
        PyErr_Format(PyExc_ValueError, "block: expected 1 to %u records, got %zd",
                     BLOCK_MAX_RECORDS, count);
    } else if (!block_begin(&maker, into.buf, (uint64_t)into.len)) {
        PyErr_Format(PyExc_ValueError, "block: expected room for %zu bytes or more, got %zd",
                     sizeof(struct block_header), into.len);
    } else if (add_all(&maker, items)) {
        const TrajectoryObject *first = (TrajectoryObject *)PyList_GET_ITEM(items, 0);
        result = PyLong_FromUnsignedLongLong(
            block_end(&maker, first->holder->segment->c.header->identity));
    }
    PyBuffer_Release(&into);
    return result;
}

/* record_checks(trajectories) -> list[int]: the checksum of each one's head, as a block has it. */
static PyObject *py_record_checks(PyObject *module, PyObject *items) {
    (void)module;
    if (!PyList_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "record_checks: expected a list of trajectories");
        return NULL;
    }
    PyObject *checks = PyList_New(PyList_GET_SIZE(items));
    for (Py_ssize_t i = 0; checks != NULL && i < PyList_GET_SIZE(checks); i++) {
        TrajectoryObject *t = readable(PyList_GET_ITEM(items, i));
        uint32_t check = 0;
        bool good = t != NULL;
        if (good && !block_head_check(py_trajectory_bytes(t), t->ref.bytes, &check)) {
            raise_changed(t);
            good = false;
        }
        PyObject *number = good ? PyLong_FromUnsignedLong(check) : NULL;
        if (number == NULL) {
            Py_CLEAR(checks);
        } else {
            PyList_SET_ITEM(checks, i, number);
        }
    }
    return checks;
}

/* record_origins(trajectories) -> list[bytes]: what each is known by among all buses. */
static PyObject *py_record_origins(PyObject *module, PyObject *items) {
    (void)module;
    if (!PyList_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "record_origins: expected a list of trajectories");
        return NULL;
    }
    PyObject *origins = PyList_New(PyList_GET_SIZE(items));
    for (Py_ssize_t i = 0; origins != NULL && i < PyList_GET_SIZE(origins); i++) {
        const TrajectoryObject *t = readable(PyList_GET_ITEM(items, i));
        PyObject *origin = t == NULL ? NULL : PyBytes_FromStringAndSize(NULL, RELAY_ORIGIN_BYTES);
        if (origin == NULL) {
            Py_CLEAR(origins);
        } else {
            origin_pack(PyBytes_AS_STRING(origin), t->holder->segment->c.header->identity,
                        t->producer_id, t->sequence);
            PyList_SET_ITEM(origins, i, origin);
        }
    }
    return origins;
}

static PyMethodDef functions[] = {
    {"record_origins", py_record_origins, METH_O, NULL},
    {"export_block", py_export_block, METH_VARARGS, NULL},
    {"record_checks", py_record_checks, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_export_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0 &&
           PyModule_AddIntConstant(module, "BLOCK_MAX_RECORDS", BLOCK_MAX_RECORDS) == 0 &&
           PyModule_AddIntConstant(module, "BLOCK_HEADER_BYTES", sizeof(struct block_header)) == 0;
}
