/* Waiting time of trainers, and samples never made by workers; see ring/observe.h. */
#include "python/put/put.h"

#include "base/clock.h"
#include "ring/observe.h"

/* note_waited(segment, seconds): add to the trainers' waiting time for groups; for the
 * collector. */
PyObject *py_note_waited(PyObject *Py_UNUSED(module), PyObject *args) {
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

/* _note_unmade(released, given_back, failed, rest_s, reason): zeros after a sample was made. */
PyObject *py_writer_note_unmade(WriterObject *self, PyObject *args) {
    unsigned int released;
    struct unmade note = {0};
    double rest_s;
    const char *reason;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "IIIds#", &released, &note.given_back, &note.failed, &rest_s,
                          &reason, &length) ||
        !py_writer_usable(self)) {
        return NULL;
    }
    if (rest_s > 0) {
        note.rests_until_ns = clock_monotonic_ns() + (uint64_t)(rest_s * 1e9);
    }
    size_t most = sizeof note.reason;
    memcpy(note.reason, reason, (size_t)length < most ? (size_t)length : most);
    unmade_note(&self->segment->c, self->c.slot_index, released, &note);
    Py_RETURN_NONE;
}
