/* export_block, record_origins and lasting_origins: a reader's records as a block, and identities
 * of records across buses, restores and relays.
 *
 * Invariant: a record stays leased while its bytes are read, under the interpreter lock. */
#include "python/record/record.h"

#include "ring/block.h"
#include "ring/relay_journal.h"

/* A readable trajectory; NULL with an exception. */
static TrajectoryObject *readable(PyObject *item) {
    TrajectoryObject *t = py_as_trajectory(item);
    return t != NULL && py_trajectory_readable(t) ? t : NULL;
}

void py_trajectory_raise_changed(const TrajectoryObject *t) {
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
        if (maker->room - maker->used < t->ref.bytes) {
            return py_refuse(
                PyExc_ValueError,
                "block: %zd records need more than the %llu bytes that there are; export "
                "fewer of them",
                PyList_GET_SIZE(items), U64(maker->room));
        }
        if (!block_add(maker, py_trajectory_bytes(t), t->ref.bytes)) {
            py_trajectory_raise_changed(t);
            return false;
        }
    }
    return true;
}

/* export_block(trajectories of one bus, into) -> int: bytes of `into` taken by the block. */
static PyObject *py_export_block(PyObject *Py_UNUSED(module), PyObject *args) {
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

static PyObject *pack_origin(const uint8_t *identity, uint64_t producer_id, uint64_t sequence) {
    PyObject *origin = PyBytes_FromStringAndSize(NULL, RELAY_ORIGIN_BYTES);
    if (origin != NULL) {
        origin_pack(PyBytes_AS_STRING(origin), identity, producer_id, sequence);
    }
    return origin;
}

/* record_origins(trajectories) -> list[bytes]: identity per record, unique across buses. */
static PyObject *py_record_origins(PyObject *Py_UNUSED(module), PyObject *items) {
    NEVER(!PyList_Check(items), NULL);
    PyObject *origins = PyList_New(PyList_GET_SIZE(items));
    for (Py_ssize_t i = 0; origins != NULL && i < PyList_GET_SIZE(origins); i++) {
        const TrajectoryObject *t = readable(PyList_GET_ITEM(items, i));
        py_list_set(&origins, i,
                    t == NULL ? NULL
                              : pack_origin(t->holder->segment->c.header->identity,
                                            t->producer_id, t->sequence));
    }
    return origins;
}

/* Lasting names of one sample: on its bus, and at its source if put by a relay. */
static PyObject *lasting_of(const TrajectoryObject *t) {
    const struct segment *segment = &t->holder->segment->c;
    struct record_header head;
    struct relay_origin from;
    PyObject *own = pack_origin(identity_of_producer(segment->header, t->producer_id),
                                t->producer_id, t->sequence);
    if (own == NULL || t->released) {
        return own == NULL ? NULL : Py_BuildValue("(N)", own);
    }
    memcpy(&head, py_trajectory_bytes(t), sizeof head);
    if (head.producer_id != t->producer_id || head.sequence != t->sequence ||
        !relay_origin_of(segment, &head, &from)) {
        return Py_BuildValue("(N)", own);
    }
    return Py_BuildValue("(NN)", own,
                         pack_origin(from.identity, from.producer_id, from.sequence));
}

static PyObject *py_lasting_origins(PyObject *Py_UNUSED(module), PyObject *items) {
    NEVER(!PyList_Check(items), NULL);
    PyObject *origins = PyList_New(PyList_GET_SIZE(items));
    for (Py_ssize_t i = 0; origins != NULL && i < PyList_GET_SIZE(origins); i++) {
        const TrajectoryObject *t = py_as_trajectory(PyList_GET_ITEM(items, i));
        bool usable = t != NULL && py_segment_usable(t->holder->segment, "Consumer");
        py_list_set(&origins, i, usable ? lasting_of(t) : NULL);
    }
    return origins;
}

/* lineage(segment) -> list[bytes]: the bus's identity, and the identities of its restored
 * ancestors. */
SEGMENT_FUNCTION(py_lineage, py_take_segment) {
    const struct bus_header *header = segment->c.header;
    PyObject *found = PyList_New(0);
    for (uint32_t i = 0; found != NULL && i <= SHMBUS_ANCESTORS; i++) {
        if (i > 0 && header->ancestors[i - 1].producers == 0) {
            continue;
        }
        py_list_add(&found, PyBytes_FromStringAndSize(
                                (const char *)(i == 0 ? header->identity
                                                      : header->ancestors[i - 1].identity),
                                SHMBUS_IDENTITY_BYTES));
    }
    return found;
}

/* leased_in_part(segment) -> bool: True if a group was ever leased with samples missing. */
SEGMENT_FUNCTION(py_leased_in_part, py_take_segment) {
    const struct bus_header *header = segment->c.header;
    return PyBool_FromLong((long)RELAXED(header->leased_in_part));
}

/* leased_state(sample) -> (state, members): mark of an earlier collector's lease, and the lease's
 * number of members; zeros if unmarked. */
static PyObject *py_leased_state(PyObject *Py_UNUSED(module), PyObject *item) {
    uint32_t state = Py_IS_TYPE(item, &TrajectoryType) ? ((TrajectoryObject *)item)->leased : 0;
    return Py_BuildValue("(II)", state, state == 0 ? 0u : shmbus_leased_members(state));
}

/* forget_leased(samples): treat marked samples like unmarked samples from now on. */
static PyObject *py_forget_leased(PyObject *Py_UNUSED(module), PyObject *items) {
    NEVER(!PyList_Check(items), NULL);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (Py_IS_TYPE(item, &TrajectoryType)) {
            ((TrajectoryObject *)item)->leased = 0;
        }
    }
    Py_RETURN_NONE;
}

PyMethodDef py_export_functions[] = {
    {"lasting_origins", py_lasting_origins, METH_O, NULL},
    {"lineage", py_lineage, METH_O, NULL},
    {"leased_in_part", py_leased_in_part, METH_O, NULL},
    {"leased_state", py_leased_state, METH_O, NULL},
    {"forget_leased", py_forget_leased, METH_O, NULL},
    {"record_origins", py_record_origins, METH_O, NULL},
    {"export_block", py_export_block, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
