/* The retry table for shmbus.stash.retries, the collector's side, and for shmbus.Producer. */
#include "python/segment/segment.h"

#include "base/clock.h"
#include "ring/retry_table.h"

static bool take_segment(PyObject *object, SegmentObject **segment) {
    if (!PyObject_TypeCheck(object, &SegmentType)) {
        PyErr_SetString(PyExc_TypeError, "expected a Segment");
        return false;
    }
    *segment = (SegmentObject *)object;
    return py_segment_usable(*segment, "handle");
}

static bool take_entry(PyObject *args, const char *format, SegmentObject **segment,
                       unsigned int *entry, unsigned long long *first, unsigned long long *second) {
    PyObject *object;
    if (!PyArg_ParseTuple(args, format, &object, entry, first, second) ||
        !take_segment(object, segment)) {
        return false;
    }
    if (*entry >= SHMBUS_RETRY_ENTRIES) {
        PyErr_SetString(PyExc_IndexError, "entry: the retry table has no such entry");
        return false;
    }
    return true;
}

/* retry_publish(segment, entry, number, id, round, split, group_size, need, index, attempt, reason):
 * for the collector. */
static PyObject *py_retry_publish(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *object;
    SegmentObject *segment;
    unsigned int entry;
    unsigned long long number;
    long long round;
    const char *id, *reason;
    Py_ssize_t id_bytes, reason_bytes;
    struct retry_request request;
    memset(&request, 0, sizeof request);
    if (!PyArg_ParseTuple(args, "OIKs#LIIIIIy#", &object, &entry, &number, &id, &id_bytes, &round,
                          &request.split, &request.group_size, &request.need, &request.index,
                          &request.attempt, &reason, &reason_bytes) ||
        !take_segment(object, &segment)) {
        return NULL;
    }
    if (entry >= SHMBUS_RETRY_ENTRIES || number == 0 || id_bytes < 1 ||
        id_bytes > (Py_ssize_t)SHMBUS_MAX_ID_BYTES ||
        reason_bytes > (Py_ssize_t)SHMBUS_RETRY_REASON_BYTES ||
        request.split >= SHMBUS_MAX_SPLITS || request.need > request.group_size ||
        request.group_size > SHMBUS_MAX_GROUP_SIZE) {
        PyErr_SetString(PyExc_ValueError, "this request does not fit into an entry");
        return NULL;
    }
    request.number = number;
    request.round = round;
    request.asked_ns = clock_monotonic_ns();
    request.id_bytes = (uint16_t)id_bytes;
    request.reason_bytes = (uint16_t)reason_bytes;
    memcpy(request.id, id, (size_t)id_bytes);
    memcpy(request.reason, reason, (size_t)reason_bytes);
    retry_publish(&segment->c, entry, &request);
    Py_RETURN_NONE;
}

/* retry_withdraw(segment, entry): for the collector; the request has ended. */
static PyObject *py_retry_withdraw(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int entry;
    if (!take_entry(args, "OI", &segment, &entry, NULL, NULL)) {
        return NULL;
    }
    retry_withdraw(&segment->c, entry);
    Py_RETURN_NONE;
}

static PyObject *describe_request(uint32_t entry, const struct retry_request *request) {
    PyObject *round = request->round == SHMBUS_NO_ROUND ? Py_NewRef(Py_None)
                                                 : PyLong_FromLongLong(request->round);
    PyObject *id = PyUnicode_DecodeUTF8(request->id, request->id_bytes, "replace");
    PyObject *reason = PyUnicode_DecodeUTF8(request->reason, request->reason_bytes, "replace");
    return Py_BuildValue("(IKKNNIIIIINK)", entry, (unsigned long long)request->number,
                         (unsigned long long)request->claimant, id, round, request->split,
                         request->group_size, request->need, request->index, request->attempt, reason,
                         (unsigned long long)request->asked_ns);
}

/* retry_requests(segment) -> list of (entry, number, claimant, id, round, split, group_size, need,
 * index, attempt, reason, asked_ns); claimant is 0 or a producer's id plus 1. */
static PyObject *py_retry_requests(PyObject *Py_UNUSED(module), PyObject *object) {
    SegmentObject *segment;
    if (!take_segment(object, &segment)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (uint32_t entry = 0; found != NULL && entry < SHMBUS_RETRY_ENTRIES; entry++) {
        struct retry_request request;
        if (!retry_read(&segment->c, entry, &request)) {
            continue;
        }
        PyObject *described = describe_request(entry, &request);
        if (described == NULL || PyList_Append(found, described) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(described);
    }
    return found;
}

/* retry_claim(segment, entry, number, producer_id) -> bool */
static PyObject *py_retry_claim(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int entry;
    unsigned long long number, producer_id;
    if (!take_entry(args, "OIKK", &segment, &entry, &number, &producer_id)) {
        return NULL;
    }
    return PyBool_FromLong(retry_claim(&segment->c, entry, number, producer_id));
}

/* retry_unclaim(segment, entry, producer_id) -> bool */
static PyObject *py_retry_unclaim(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int entry;
    unsigned long long producer_id;
    if (!take_entry(args, "OIK", &segment, &entry, &producer_id, NULL)) {
        return NULL;
    }
    return PyBool_FromLong(retry_unclaim(&segment->c, entry, producer_id));
}

/* retry_note(segment, open, groups_failed): for the collector; what others read first. */
static PyObject *py_retry_note(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *object;
    SegmentObject *segment;
    unsigned int open;
    unsigned long long failed;
    if (!PyArg_ParseTuple(args, "OIK", &object, &open, &failed) ||
        !take_segment(object, &segment)) {
        return NULL;
    }
    atomic_store_explicit(&segment->c.header->retries_open, open, memory_order_relaxed);
    atomic_store_explicit(&segment->c.header->groups_failed, failed, memory_order_relaxed);
    Py_RETURN_NONE;
}

/* retry_noted(segment) -> (open, groups_failed) */
static PyObject *py_retry_noted(PyObject *Py_UNUSED(module), PyObject *object) {
    SegmentObject *segment;
    if (!take_segment(object, &segment)) {
        return NULL;
    }
    struct bus_header *header = segment->c.header;
    return Py_BuildValue(
        "(IK)", atomic_load_explicit(&header->retries_open, memory_order_relaxed),
        (unsigned long long)atomic_load_explicit(&header->groups_failed, memory_order_relaxed));
}

static PyMethodDef functions[] = {
    {"retry_publish", py_retry_publish, METH_VARARGS, NULL},
    {"retry_withdraw", py_retry_withdraw, METH_VARARGS, NULL},
    {"retry_requests", py_retry_requests, METH_O, NULL},
    {"retry_claim", py_retry_claim, METH_VARARGS, NULL},
    {"retry_unclaim", py_retry_unclaim, METH_VARARGS, NULL},
    {"retry_note", py_retry_note, METH_VARARGS, NULL},
    {"retry_noted", py_retry_noted, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_retry_add_functions(PyObject *module) {
    return PyModule_AddIntConstant(module, "RETRY_ENTRIES", SHMBUS_RETRY_ENTRIES) == 0 &&
           PyModule_AddIntConstant(module, "RETRY_REASON_BYTES", SHMBUS_RETRY_REASON_BYTES) == 0 &&
           PyModule_AddFunctions(module, functions) == 0;
}
