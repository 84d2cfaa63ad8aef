/* Waiting time of trainers; the table is in ring/observe.h. */
#include "python/put/put.h"

#include "ring/observe.h"

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

PyMethodDef py_waits_functions[] = {
    {"note_waited", py_note_waited, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct named_value py_waits_constants[] = {
    {"WAIT_ROW_BYTES", (long)sizeof(struct wait_row)},
    {NULL, 0},
};

bool py_waits_add_objects(PyObject *module) {
    /* WAITS: what is waited for, by number. */
    return py_add_object(module, "WAITS",
                         Py_BuildValue("(ssss)", "space", "paused", "ahead", "groups"));
}
_Static_assert(SHMBUS_WAITS == 4, "WAITS has a name for each");
