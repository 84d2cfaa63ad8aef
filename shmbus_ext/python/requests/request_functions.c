/* The request lane for shmbus.feeder, and for shmbus.stash.requests, the collector's side. */
#include "python/requests/request_functions.h"

#include <errno.h>

#include "python/requests/request_arguments.h"
#include "python/segment/split_labels.h"
#include "ring/request_feed.h"
#include "ring/requests.h"

/* More than any lane has, and with an id still less than 32 bits count. */
#define MOST_PROMPT_BYTES ((Py_ssize_t)UINT32_MAX - 1024)

static bool parse_offer(PyObject *item, struct request_offer *offer) {
    PyObject *round;
    Py_ssize_t id_bytes, prompt_bytes;
    const char *id, *prompt;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "expected an offer as a tuple");
        return false;
    }
    if (!PyArg_ParseTuple(item, "y#OIIIIy#", &id, &id_bytes, &round, &offer->split,
                          &offer->group_size, &offer->need, &offer->level, &prompt,
                          &prompt_bytes) ||
        !py_take_round(round, &offer->round)) {
        return false;
    }
    if (id_bytes < 1 || id_bytes > (Py_ssize_t)SHMBUS_MAX_ID_BYTES ||
        offer->split >= SHMBUS_MAX_SPLITS ||
        offer->group_size < 1 || offer->group_size > SHMBUS_MAX_GROUP_SIZE || offer->need < 1 ||
        offer->need > offer->group_size || offer->level >= SHMBUS_REQUEST_LEVELS) {
        PyErr_SetString(PyExc_ValueError, "this request does not fit into a row");
        return false;
    }
    offer->id = id;
    offer->prompt = prompt;
    offer->id_bytes = (uint32_t)id_bytes;
    offer->prompt_bytes =
        (uint32_t)(prompt_bytes < MOST_PROMPT_BYTES ? prompt_bytes : MOST_PROMPT_BYTES);
    return true;
}

/* One that this call does not offer: what never fits is refused before anything is offered. */
static bool later_fits(const SegmentObject *segment, PyObject *item) {
    struct request_offer offer;
    return parse_offer(item, &offer) && request_can_fit(&segment->c, &offer);
}

/* request_offer(segment, offers, start) -> (done, number): offers those from `start` on, tuples
 * (id, round, split, group_size, need, level, prompt) of bytes and ints, up to
 * REQUEST_OFFERS_AT_ONCE of them. `number` is that of the last one. Where `done` is 0: 0 where the
 * lane is full, -1 where another feeder is at work, -2 where one of them never fits. */
static PyObject *py_request_offer(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *object, *list;
    Py_ssize_t start;
    SegmentObject *segment;
    struct request_offer offers[REQUEST_OFFERS_AT_ONCE];
    if (!PyArg_ParseTuple(args, "OO!n", &object, &PyList_Type, &list, &start) ||
        !py_take_segment(object, &segment)) {
        return NULL;
    }
    uint32_t count = 0, done;
    for (Py_ssize_t i = start < 0 ? 0 : start; i < PyList_GET_SIZE(list); i++) {
        if (count < REQUEST_OFFERS_AT_ONCE) {
            if (!parse_offer(PyList_GET_ITEM(list, i), &offers[count++])) {
                return NULL;
            }
        } else if (start > 0) {
            break;
        } else if (!later_fits(segment, PyList_GET_ITEM(list, i))) {
            return PyErr_Occurred() ? NULL : Py_BuildValue("(Ii)", 0, -2);
        }
    }
    if (segment->c.read_only || count == 0) {
        PyErr_SetString(PyExc_ValueError, "expected offers, and a segment that can be written");
        return NULL;
    }
    uint64_t number = 0;
    /* Under the interpreter lock: two threads of one handle share its file lock. */
    enum request_feed status = request_offer(&segment->c, offers, count, &done, &number);
    if (status == FEED_ERROR) {
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, segment->name);
    }
    return Py_BuildValue("(IL)", done,
                         done > 0                ? (long long)number
                         : status == FEED_FULL   ? 0LL
                         : status == FEED_HELD   ? -1LL
                                                 : -2LL);
}

static struct bell *bell_of(const SegmentObject *segment, int room) {
    struct request_lane *lane = segment->c.requests.lane;
    return room ? &lane->room : &lane->work;
}

/* request_want(segment, room) -> ticket: announces a wait for room, or for a sample to make. */
static PyObject *py_request_want(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *object;
    SegmentObject *segment;
    int room;
    if (!PyArg_ParseTuple(args, "Op", &object, &room) || !py_take_segment(object, &segment)) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(bell_announce(bell_of(segment, room)));
}

/* request_await(segment, room, ticket, timeout_s): sleeps until the bell is rung after it. */
static PyObject *py_request_await(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *object;
    SegmentObject *segment;
    int room;
    unsigned int ticket;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "OpId", &object, &room, &ticket, &timeout_s) ||
        !py_take_segment(object, &segment)) {
        return NULL;
    }
    Py_INCREF(object); /* it may be closed during the wait; its mapping stays */
    Py_BEGIN_ALLOW_THREADS
    bell_wait(bell_of(segment, room), ticket, (int64_t)(timeout_s * 1e9));
    Py_END_ALLOW_THREADS
    Py_DECREF(object);
    if (PyErr_CheckSignals() < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static bool take_row(PyObject *args, SegmentObject **segment, unsigned int *row,
                     unsigned long long *number) {
    PyObject *object;
    if (!PyArg_ParseTuple(args, "OIK", &object, row, number) ||
        !py_take_segment(object, segment)) {
        return false;
    }
    if (*row >= (*segment)->c.requests.row_count) {
        PyErr_SetString(PyExc_IndexError, "row: the request lane has no such row");
        return false;
    }
    return true;
}

/* request_close(segment, row, number): no more of its samples are handed out; for the collector. */
static PyObject *py_request_close(PyObject *module, PyObject *args) {
    (void)module;
    SegmentObject *segment;
    unsigned int row;
    unsigned long long number;
    if (!take_row(args, &segment, &row, &number)) {
        return NULL;
    }
    request_close(&segment->c, row, number);
    Py_RETURN_NONE;
}

/* request_end(segment, row, number): its group has ended; for the collector. */
static PyObject *py_request_end(PyObject *module, PyObject *args) {
    (void)module;
    SegmentObject *segment;
    unsigned int row;
    unsigned long long number;
    if (!take_row(args, &segment, &row, &number)) {
        return NULL;
    }
    request_end(&segment->c, row, number);
    Py_RETURN_NONE;
}

PyObject *py_describe_request(SegmentObject *segment, uint32_t row, uint64_t number) {
    struct request_text text;
    if (!request_read(&segment->c, row, number, &text, NULL)) {
        return Py_NewRef(Py_None);
    }
    PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)text.data_bytes);
    if (data == NULL) {
        return NULL;
    }
    uint8_t *raw = (uint8_t *)PyBytes_AS_STRING(data);
    if (!request_read(&segment->c, row, number, &text, raw)) {
        Py_DECREF(data);
        return Py_NewRef(Py_None);
    }
    const char *chars = (const char *)raw;
    PyObject *round = text.round == SHMBUS_NO_ROUND ? Py_NewRef(Py_None)
                                                    : PyLong_FromLongLong(text.round);
    return Py_BuildValue(
        "(NNNIIIKIN)", PyUnicode_DecodeUTF8(chars, text.id_bytes, "replace"), round,
        py_split_label(segment, text.split), (unsigned int)text.group_size,
        (unsigned int)text.need, (unsigned int)text.level, (unsigned long long)text.offered_ns,
        (unsigned int)text.id_bytes, data);
}

/* request_text(segment, row, number) -> (id, round, split, group_size, need, level, offered_ns,
 * prompt_at, data) or None where it has ended; the prompt is data[prompt_at:]. */
static PyObject *py_request_text(PyObject *module, PyObject *args) {
    (void)module;
    SegmentObject *segment;
    unsigned int row;
    unsigned long long number;
    return take_row(args, &segment, &row, &number) ? py_describe_request(segment, row, number)
                                                   : NULL;
}

/* request_rows(segment) -> list of (row, number, admitted, open, claimed, done), oldest first by
 * number where the caller sorts. */
static PyObject *py_request_rows(PyObject *module, PyObject *object) {
    (void)module;
    SegmentObject *segment;
    if (!py_take_segment(object, &segment)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    uint32_t rows = requests_are_used(&segment->c) ? segment->c.requests.row_count : 0;
    for (uint32_t row = 0; found != NULL && row < rows; row++) {
        struct request_counts counts;
        uint64_t number = request_open_row(&segment->c, row);
        struct request_text text;
        if (number == 0 || !request_read(&segment->c, row, number, &text, NULL) ||
            !request_count(&segment->c, row, number, &counts)) {
            continue;
        }
        PyObject *described =
            Py_BuildValue("(IKNIII)", row, (unsigned long long)number,
                          PyBool_FromLong(text.admitted), counts.open, counts.claimed, counts.done);
        if (described == NULL || PyList_Append(found, described) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(described);
    }
    return found;
}

/* request_find(segment, id, round, split) -> what request_text gives, of the oldest open request of
 * that group; None where there is none. */
static PyObject *py_request_find(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *object, *round_object;
    SegmentObject *segment;
    const char *id;
    Py_ssize_t id_bytes;
    int64_t round;
    unsigned int split;
    if (!PyArg_ParseTuple(args, "Os#OI", &object, &id, &id_bytes, &round_object, &split) ||
        !py_take_segment(object, &segment) || !py_take_round(round_object, &round)) {
        return NULL;
    }
    uint32_t row;
    uint64_t number = request_find(&segment->c, id, (uint32_t)id_bytes, round, split, &row);
    return number == 0 ? Py_NewRef(Py_None) : py_describe_request(segment, row, number);
}

/* request_since(segment, number) -> list of (row, number, id, round, label of the split) of open
 * requests after that one, in the order of the rows. */
static PyObject *py_request_since(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *object;
    SegmentObject *segment;
    unsigned long long after;
    if (!PyArg_ParseTuple(args, "OK", &object, &after) || !py_take_segment(object, &segment)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (uint32_t row = 0; found != NULL && row < segment->c.requests.row_count; row++) {
        uint64_t number = request_open_row(&segment->c, row);
        PyObject *text = number > after ? py_describe_request(segment, row, number) : NULL;
        if (text == NULL && PyErr_Occurred()) {
            Py_CLEAR(found);
        }
        if (text == NULL || text == Py_None) {
            Py_XDECREF(text);
            continue;
        }
        PyObject *described =
            Py_BuildValue("(IKOOO)", row, (unsigned long long)number, PyTuple_GET_ITEM(text, 0),
                          PyTuple_GET_ITEM(text, 1), PyTuple_GET_ITEM(text, 2));
        Py_DECREF(text);
        if (described == NULL || PyList_Append(found, described) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(described);
    }
    return found;
}

/* request_number(segment) -> int: of the last request; 0 where the lane was never used. */
static PyObject *py_request_number(PyObject *module, PyObject *object) {
    (void)module;
    SegmentObject *segment;
    if (!py_take_segment(object, &segment)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(
        atomic_load_explicit(&segment->c.requests.lane->number, memory_order_acquire));
}

/* request_totals(segment) -> (offered, open, claimed, done, given_up, groups, taken_ns, free_bytes,
 * bytes): samples, groups that have not ended, and room for prompts. */
static PyObject *py_request_totals(PyObject *module, PyObject *object) {
    (void)module;
    SegmentObject *segment;
    if (!py_take_segment(object, &segment)) {
        return NULL;
    }
    struct request_totals totals;
    request_total(&segment->c, &totals);
    const struct request_parts *parts = &segment->c.requests;
    return Py_BuildValue(
        "(KKKKKKKKK)", (unsigned long long)totals.offered, (unsigned long long)totals.open,
        (unsigned long long)totals.claimed, (unsigned long long)totals.done,
        (unsigned long long)totals.given_up, (unsigned long long)totals.groups,
        (unsigned long long)atomic_load_explicit(&parts->lane->taken_ns, memory_order_relaxed),
        (unsigned long long)request_free_bytes(&segment->c),
        (unsigned long long)parts->unit_count * SHMBUS_REQUEST_UNIT);
}

/* request_bytes(segment) -> int: all that the lane takes of the segment. */
static PyObject *py_request_bytes(PyObject *module, PyObject *object) {
    (void)module;
    SegmentObject *segment;
    if (!py_take_segment(object, &segment)) {
        return NULL;
    }
    return PyLong_FromSsize_t(segment->c.data - (const uint8_t *)segment->c.requests.lane);
}

static PyMethodDef functions[] = {
    {"request_offer", py_request_offer, METH_VARARGS, NULL},
    {"request_want", py_request_want, METH_VARARGS, NULL},
    {"request_await", py_request_await, METH_VARARGS, NULL},
    {"request_close", py_request_close, METH_VARARGS, NULL},
    {"request_end", py_request_end, METH_VARARGS, NULL},
    {"request_text", py_request_text, METH_VARARGS, NULL},
    {"request_rows", py_request_rows, METH_O, NULL},
    {"request_find", py_request_find, METH_VARARGS, NULL},
    {"request_since", py_request_since, METH_VARARGS, NULL},
    {"request_bytes", py_request_bytes, METH_O, NULL},
    {"request_number", py_request_number, METH_O, NULL},
    {"request_totals", py_request_totals, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_request_add_functions(PyObject *module) {
    return PyModule_AddIntConstant(module, "REQUEST_LEVELS", SHMBUS_REQUEST_LEVELS) == 0 &&
           PyModule_AddIntConstant(module, "REQUEST_UNIT", SHMBUS_REQUEST_UNIT) == 0 &&
           PyModule_AddIntConstant(module, "REQUEST_MIN_BYTES", (long)SHMBUS_REQUEST_MIN_BYTES) ==
               0 &&
           PyModule_AddIntConstant(module, "REQUEST_MAX_BYTES", (long)SHMBUS_REQUEST_MAX_BYTES) ==
               0 &&
           PyModule_AddFunctions(module, functions) == 0;
}
