/* Samples that a writer has begun; the table is in ring/observe.h. */
#include "python/put/put.h"

#include "ring/observe.h"

struct sample {
    uint64_t key;
    uint32_t index;
};

/* (id, round, split or None, index), checked by the caller; false with an exception. */
static bool take_sample(WriterObject *self, PyObject *args, struct sample *sample) {
    const char *id;
    Py_ssize_t id_bytes;
    PyObject *split_object;
    int64_t round;
    uint32_t split = SHMBUS_SPLIT_TRAIN;
    if (!PyArg_ParseTuple(args, "s#O&OI", &id, &id_bytes, py_take_round, &round, &split_object,
                          &sample->index) ||
        !py_writer_usable(self)) {
        return false;
    }
    if (split_object != Py_None) {
        split = py_split_number(self->segment, split_object);
        if (split >= SHMBUS_MAX_SPLITS) {
            return false;
        }
    }
    sample->key = begun_key(id, (uint32_t)id_bytes, round, split);
    return true;
}

/* _begin(id, round, split, index) -> bool: False where the table is full. */
PyObject *py_writer_begin(WriterObject *self, PyObject *args) {
    struct sample sample;
    if (!take_sample(self, args, &sample)) {
        return NULL;
    }
    enum begun_verdict verdict =
        begun_note(&self->segment->c, self->c.producer_id, sample.key, sample.index);
    self->c.begun += verdict == BEGUN_NOTED;
    return PyBool_FromLong(verdict != BEGUN_FULL);
}

/* _leave_begun(id, round, split, index) -> bool: whether it was noted. */
PyObject *py_writer_leave_begun(WriterObject *self, PyObject *args) {
    struct sample sample;
    if (!take_sample(self, args, &sample)) {
        return NULL;
    }
    bool ended = begun_end(&self->segment->c, self->c.producer_id, sample.key, sample.index);
    self->c.begun -= ended;
    return PyBool_FromLong(ended);
}

/* begun_key(id, round, split number) -> int: what the table calls a group. */
static PyObject *py_begun_key(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *id;
    Py_ssize_t id_bytes;
    unsigned int split;
    int64_t round;
    if (!PyArg_ParseTuple(args, "s#O&I", &id, &id_bytes, py_take_round, &round, &split)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(begun_key(id, (uint32_t)id_bytes, round, split));
}

/* note_waited(segment, seconds): trainers waited for groups so much longer; for the collector. */
static PyObject *py_note_waited(PyObject *Py_UNUSED(module), PyObject *args) {
    double seconds;
    SegmentObject *segment;
    if (!PyArg_ParseTuple(args, "O&d", py_take_segment, &segment, &seconds)) {
        return NULL;
    }
    if (seconds > 0) {
        waits_add(&segment->c, segment->c.max_producers, SHMBUS_WAIT_GROUPS,
                  (uint64_t)(seconds * 1e9));
    }
    Py_RETURN_NONE;
}

PyMethodDef py_begun_functions[] = {
    {"begun_key", py_begun_key, METH_VARARGS, NULL},
    {"note_waited", py_note_waited, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct named_value py_begun_constants[] = {
    {"BEGUN_ROWS", SHMBUS_BEGUN_ROWS},
    {"WAIT_ROW_BYTES", (long)sizeof(struct wait_row)},
    {NULL, 0},
};

bool py_begun_add_objects(PyObject *module) {
    /* WAITS: what is waited for, by number. */
    return py_add_object(module, "WAITS",
                         Py_BuildValue("(ssss)", "space", "paused", "ahead", "groups"));
}
_Static_assert(SHMBUS_WAITS == 4, "WAITS has a name for each");
