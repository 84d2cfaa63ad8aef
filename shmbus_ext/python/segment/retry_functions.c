/* The retry table for shmbus.stash.retries on the collector's side, and for shmbus.Producer. */
#include "python/segment/segment.h"

#include "base/clock.h"
#include "ring/requests.h"
#include "ring/retry_table.h"

static bool take_entry(PyObject *args, const char *format, SegmentObject **segment,
                       unsigned int *entry, unsigned long long *first, unsigned long long *second) {
    if (!PyArg_ParseTuple(args, format, py_take_segment, segment, entry, first, second)) {
        return false;
    }
    NEVER(*entry >= SHMBUS_RETRY_ENTRIES, false);
    return true;
}

/* retry_publish(segment, entry, number, id, round, split, group_size, need, index, attempt, reason,
 * late=0): for the collector. */
static PyObject *py_retry_publish(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int entry, split, need, late = 0;
    unsigned long long number;
    long long round;
    const char *id, *reason;
    Py_ssize_t id_bytes, reason_bytes;
    struct retry_entry request;
    memset(&request, 0, sizeof request);
    if (!PyArg_ParseTuple(args, "O&IKs#LIIIIIy#|I", py_take_segment, &segment, &entry, &number, &id,
                          &id_bytes, &round, &split, &request.group_size, &need, &request.index,
                          &request.attempt, &reason, &reason_bytes, &late)) {
        return NULL;
    }
    NEVER(entry >= SHMBUS_RETRY_ENTRIES || number == 0 || id_bytes < 1 ||
          id_bytes > (Py_ssize_t)SHMBUS_MAX_ID_BYTES ||
          reason_bytes > (Py_ssize_t)SHMBUS_RETRY_REASON_BYTES || split >= SHMBUS_MAX_SPLITS ||
          need > request.group_size || request.group_size > SHMBUS_MAX_GROUP_SIZE, NULL);
    request.number = number;
    request.round = round;
    request.asked_ns = clock_monotonic_ns();
    request.need = (uint16_t)need;
    request.split = (uint16_t)split;
    request.late = late != 0;
    request.id_bytes = (uint16_t)id_bytes;
    request.reason_bytes = (uint16_t)reason_bytes;
    memcpy(request.id, id, (size_t)id_bytes);
    memcpy(request.reason, reason, (size_t)reason_bytes);
    retry_publish(&segment->c, entry, &request);
    request_ring(&segment->c, 1);
    Py_RETURN_NONE;
}

/* retry_withdraw(segment, entry): end the request; for the collector. */
static PyObject *py_retry_withdraw(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int entry;
    if (!take_entry(args, "O&I", &segment, &entry, NULL, NULL)) {
        return NULL;
    }
    retry_withdraw(&segment->c, entry);
    Py_RETURN_NONE;
}

/* retry_take_back(segment, entry) -> bool or None: end the request at its deadline; False if
 * answered, None while its claimant commits the answer. */
static PyObject *py_retry_take_back(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int entry;
    if (!take_entry(args, "O&I", &segment, &entry, NULL, NULL)) {
        return NULL;
    }
    enum retry_taken taken = retry_take_back(&segment->c, entry);
    return taken == RETRY_COMMITTING ? Py_NewRef(Py_None)
                                     : PyBool_FromLong(taken == RETRY_TAKEN_BACK);
}

static PyObject *describe_request(uint32_t entry, const struct retry_entry *request) {
    PyObject *id = PyUnicode_DecodeUTF8(request->id, request->id_bytes, "replace");
    PyObject *reason = PyUnicode_DecodeUTF8(request->reason, request->reason_bytes, "replace");
    return Py_BuildValue("(IKKNNIIIIINK)", entry, U64(request->number),
                         U64(RELAXED(request->claim)), id, py_round(request->round),
                         (unsigned int)request->split, request->group_size,
                         (unsigned int)request->need, request->index, request->attempt, reason,
                         U64(request->asked_ns));
}

/* retry_requests(segment) -> list of (entry, number, claimant, id, round, split, group_size, need,
 * index, attempt, reason, asked_ns); claimant is 0 or a producer's id plus 1. */
SEGMENT_FUNCTION(py_retry_requests, py_take_segment) {
    PyObject *found = PyList_New(0);
    for (uint32_t entry = 0; found != NULL && entry < SHMBUS_RETRY_ENTRIES; entry++) {
        struct retry_entry request;
        if (!retry_read(&segment->c, entry, &request)) {
            continue;
        }
        py_list_add(&found, describe_request(entry, &request));
    }
    return found;
}

static PyObject *change_claim(PyObject *args,
                              bool (*change)(struct segment *, uint32_t, uint64_t, uint64_t)) {
    SegmentObject *segment;
    unsigned int entry;
    unsigned long long number, producer_id;
    if (!take_entry(args, "O&IKK", &segment, &entry, &number, &producer_id)) {
        return NULL;
    }
    return PyBool_FromLong(change(&segment->c, entry, number, producer_id));
}

static PyObject *py_retry_claim(PyObject *Py_UNUSED(module), PyObject *args) {
    return change_claim(args, request_claim_retry);
}

static PyObject *py_retry_unclaim(PyObject *Py_UNUSED(module), PyObject *args) {
    return change_claim(args, retry_unclaim);
}

/* retry_note(segment, open, groups_failed): publish the counts read first by other processes; for
 * the collector. */
static PyObject *py_retry_note(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int open;
    unsigned long long failed;
    if (!PyArg_ParseTuple(args, "O&IK", py_take_segment, &segment, &open, &failed)) {
        return NULL;
    }
    SET_RELAXED(segment->c.header->retries_open, open);
    SET_RELAXED(segment->c.header->groups_failed, failed);
    Py_RETURN_NONE;
}

SEGMENT_FUNCTION(py_retry_noted, py_take_segment) {
    struct bus_header *header = segment->c.header;
    return Py_BuildValue("(IK)", RELAXED(header->retries_open),
                         U64(RELAXED(header->groups_failed)));
}

PyMethodDef py_retry_functions[] = {
    {"retry_publish", py_retry_publish, METH_VARARGS, NULL},
    {"retry_withdraw", py_retry_withdraw, METH_VARARGS, NULL},
    {"retry_take_back", py_retry_take_back, METH_VARARGS, NULL},
    {"retry_requests", py_retry_requests, METH_O, NULL},
    {"retry_claim", py_retry_claim, METH_VARARGS, NULL},
    {"retry_unclaim", py_retry_unclaim, METH_VARARGS, NULL},
    {"retry_note", py_retry_note, METH_VARARGS, NULL},
    {"retry_noted", py_retry_noted, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
