/* The request lane for shmbus.handles.feeder, and for shmbus.stash.upkeep on the collector's side. */
#include "python/segment/segment.h"

#include <errno.h>

#include "ring/lead.h"
#include "ring/requests.h"

/* Above every lane's capacity, yet still countable in 32 bits together with an id. */
#define MOST_PROMPT_BYTES ((Py_ssize_t)UINT32_MAX - 1024)

static bool parse_offer(PyObject *item, struct request_offer *offer) {
    Py_ssize_t id_bytes, prompt_bytes;
    const char *id, *prompt;
    NEVER(!PyTuple_Check(item), false);
    if (!PyArg_ParseTuple(item, "y#O&IIIIy#", &id, &id_bytes, py_take_round, &offer->round,
                          &offer->split, &offer->group_size, &offer->need, &offer->level, &prompt,
                          &prompt_bytes)) {
        return false;
    }
    NEVER(id_bytes < 1 || id_bytes > (Py_ssize_t)SHMBUS_MAX_ID_BYTES ||
          offer->split >= SHMBUS_MAX_SPLITS || offer->group_size < 1 ||
          offer->group_size > SHMBUS_MAX_GROUP_SIZE || offer->need < 1 ||
          offer->need > offer->group_size || offer->level >= SHMBUS_REQUEST_LEVELS, false);
    offer->id = id;
    offer->prompt = prompt;
    offer->id_bytes = (uint32_t)id_bytes;
    offer->prompt_bytes =
        (uint32_t)(prompt_bytes < MOST_PROMPT_BYTES ? prompt_bytes : MOST_PROMPT_BYTES);
    return true;
}

/* Check a later offer: an impossible offer is refused before the first offer is made. */
static bool later_fits(const SegmentObject *segment, PyObject *item) {
    struct request_offer offer;
    return parse_offer(item, &offer) && request_can_fit(&segment->c, &offer);
}

/* request_offer(segment, offers, start) -> (done, number): offer the items from `start` on, tuples
 * (id, round, split, group_size, need, level, prompt) of bytes and ints, up to
 * REQUEST_OFFERS_AT_ONCE items. `number` belongs to the last request offered. If `done` is 0,
 * `number` is 0 for a full lane, -1 while a second feeder works, -2 if an offer can never fit. */
static PyObject *py_request_offer(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *list;
    Py_ssize_t start;
    SegmentObject *segment;
    struct request_offer offers[REQUEST_OFFERS_AT_ONCE];
    if (!PyArg_ParseTuple(args, "O&O!n", py_take_segment, &segment, &PyList_Type, &list, &start)) {
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
    NEVER(segment->c.read_only || count == 0, NULL);
    uint64_t number = 0;
    /* Keep the interpreter lock: two threads of one handle share its file lock. */
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

/* request_want(segment, room) -> ticket: announce a wait for room, or for a sample to make. */
static PyObject *py_request_want(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    int room;
    if (!PyArg_ParseTuple(args, "O&p", py_take_segment, &segment, &room)) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(bell_announce(bell_of(segment, room)));
}

/* request_await(segment, room, ticket, timeout_s, rests=False): sleep until the bell rings after the
 * ticket; a worker that rests takes no wake-up from an idle worker. */
static PyObject *py_request_await(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    int room;
    unsigned int ticket;
    double timeout_s;
    int rests = 0;
    if (!PyArg_ParseTuple(args, "O&pId|p", py_take_segment, &segment, &room, &ticket, &timeout_s,
                          &rests)) {
        return NULL;
    }
    uint32_t kinds = room ? BELL_ALL : rests ? WORK_RESTS : WORK_IDLE;
    Py_INCREF(segment); /* a close during the wait must not unmap the segment */
    Py_BEGIN_ALLOW_THREADS
    bell_wait_for(bell_of(segment, room), kinds, ticket, (int64_t)(timeout_s * 1e9));
    Py_END_ALLOW_THREADS Py_DECREF(segment);
    if (Py_MakePendingCalls() < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static bool take_row(PyObject *args, SegmentObject **segment, unsigned int *row,
                     unsigned long long *number) {
    if (!PyArg_ParseTuple(args, "O&IK", py_take_segment, segment, row, number)) {
        return false;
    }
    NEVER(*row >= (*segment)->c.requests.row_count, false);
    return true;
}

/* Define a function of a segment, a row, and a request's number; its body follows. */
#define ROW_FUNCTION(name)                                                                       \
    static PyObject *name##_of(SegmentObject *segment, uint32_t row, uint64_t number);           \
    static PyObject *name(PyObject *Py_UNUSED(module), PyObject *args) {                         \
        SegmentObject *segment;                                                                  \
        unsigned int row;                                                                        \
        unsigned long long number;                                                               \
        return take_row(args, &segment, &row, &number) ? name##_of(segment, row, number) : NULL; \
    }                                                                                            \
    static PyObject *name##_of(SegmentObject *segment, uint32_t row, uint64_t number)

/* request_close(segment, row, number): hand out no more of its samples; for the collector. */
ROW_FUNCTION(py_request_close) {
    request_close(&segment->c, row, number);
    Py_RETURN_NONE;
}

/* request_end(segment, row, number): mark the group as ended; for the collector. */
ROW_FUNCTION(py_request_end) {
    request_end(&segment->c, row, number);
    Py_RETURN_NONE;
}

/* request_send(segment, row, number) -> int: pass the row's open samples to other nodes and return
 * their number. */
ROW_FUNCTION(py_request_send) {
    return PyLong_FromUnsignedLong(request_send(&segment->c, row, number));
}

/* request_answered(segment, row, number) -> bool: True if open, with a sample made, or none to make. */
ROW_FUNCTION(py_request_answered) {
    struct request_counts counts;
    return PyBool_FromLong(request_count(&segment->c, row, number, &counts) &&
                           (counts.done > 0 || counts.open + counts.claimed == 0));
}

/* request_wanted(segment) -> bool: True if a worker asked for a sample after the last became
 * available. */
SEGMENT_FUNCTION(py_request_wanted, py_take_segment) {
    return PyBool_FromLong((RELAXED(segment->c.requests.lane->work.wanted) & WORK_IDLE) != 0);
}

PyObject *py_describe_request(SegmentObject *segment, uint32_t row, uint64_t number) {
    struct request_row text;
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
    return Py_BuildValue(
        "(NNNIIIKIN)", PyUnicode_DecodeUTF8(chars, text.id_bytes, "replace"), py_round(text.round),
        py_split_label(segment, text.split), (unsigned int)text.group_size, (unsigned int)text.need,
        (unsigned int)text.level, U64(text.offered_ns), (unsigned int)text.id_bytes, data);
}

/* request_text(segment, row, number) -> (id, round, split, group_size, need, level, offered_ns,
 * prompt_at, data), or None for an ended request; the prompt is data[prompt_at:]. */
ROW_FUNCTION(py_request_text) {
    return py_describe_request(segment, row, number);
}

/* request_rows(segment) -> list of (row, number, admitted, open, claimed, done) */
SEGMENT_FUNCTION(py_request_rows, py_take_segment) {
    PyObject *found = PyList_New(0);
    uint32_t rows = requests_are_used(&segment->c) ? segment->c.requests.row_count : 0;
    for (uint32_t row = 0; found != NULL && row < rows; row++) {
        struct request_counts counts;
        uint64_t number = request_open_row(&segment->c, row);
        struct request_row text;
        if (number == 0 || !request_read(&segment->c, row, number, &text, NULL) ||
            !request_count(&segment->c, row, number, &counts)) {
            continue;
        }
        PyObject *admitted = PyBool_FromLong(request_is_admitted(&segment->c, row));
        py_list_add(&found, Py_BuildValue("(IKNIII)", row, U64(number), admitted, counts.open,
                                          counts.claimed, counts.done));
    }
    return found;
}

/* A group's name, as arguments (segment, id, round, split number). */
struct group_name {
    SegmentObject *segment;
    const char *id;
    Py_ssize_t id_bytes;
    int64_t round;
    unsigned int split;
};

static bool take_group(PyObject *args, struct group_name *group) {
    return PyArg_ParseTuple(args, "O&s#O&I", py_take_segment, &group->segment, &group->id,
                            &group->id_bytes, py_take_round, &group->round, &group->split);
}

/* Define a function of a named group; its body follows. */
#define GROUP_FUNCTION(name)                                                                     \
    static PyObject *name##_of(SegmentObject *segment, const struct group_name *group);          \
    static PyObject *name(PyObject *Py_UNUSED(module), PyObject *args) {                         \
        struct group_name group;                                                                 \
        return take_group(args, &group) ? name##_of(group.segment, &group) : NULL;               \
    }                                                                                            \
    static PyObject *name##_of(SegmentObject *segment, const struct group_name *group)

/* Find the oldest open request of a group; return its number, 0 if missing. */
static uint64_t find_row(const struct group_name *group, uint32_t *row) {
    return request_find(&group->segment->c, group->id, (uint32_t)group->id_bytes, group->round,
                        group->split, row);
}

/* request_find(segment, id, round, split) -> request_text of the oldest open request, or None. */
GROUP_FUNCTION(py_request_find) {
    uint32_t row;
    uint64_t number = find_row(group, &row);
    return number == 0 ? Py_NewRef(Py_None) : py_describe_request(segment, row, number);
}

/* request_revoke(segment, id, round, split) -> int or None: number of samples of the oldest open
 * request taken from their owners; None without an open request. */
GROUP_FUNCTION(py_request_revoke) {
    uint32_t row;
    uint64_t number = find_row(group, &row);
    return number == 0 ? Py_NewRef(Py_None)
                       : PyLong_FromUnsignedLong(request_revoke(&segment->c, row, number));
}

/* request_number(segment) -> int: number of the last request; 0 for an unused lane. */
SEGMENT_FUNCTION(py_request_number, py_take_segment) {
    return PyLong_FromUnsignedLongLong(ACQUIRE(segment->c.requests.lane->number));
}

/* request_changes(segment, seen, numbers) -> (seen, changed): counts of the chunks' changes, and
 * (row, number or 0) of rows unlike `numbers`, in chunks with a change since `seen` or b"". */
static PyObject *py_request_changes(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    Py_buffer seen, numbers;
    if (!PyArg_ParseTuple(args, "O&y*y*", py_take_segment, &segment, &seen, &numbers)) {
        return NULL;
    }
    const struct request_parts *parts = &segment->c.requests;
    uint32_t chunks = (parts->row_count + SHMBUS_REQUEST_CHUNK - 1) / SHMBUS_REQUEST_CHUNK;
    PyObject *now = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(chunks * sizeof(uint64_t)));
    PyObject *found = now == NULL ? NULL : PyList_New(0);
    const uint64_t *then = seen.buf, *known = numbers.buf;
    uint64_t *counts = now == NULL ? NULL : (uint64_t *)(void *)PyBytes_AS_STRING(now);
    for (uint32_t row = 0; found != NULL && row < parts->row_count; row++) {
        uint32_t chunk = row / SHMBUS_REQUEST_CHUNK;
        if (row % SHMBUS_REQUEST_CHUNK == 0) {
            counts[chunk] = request_changes(parts, chunk);
            if (seen.len > 0 && counts[chunk] != REQUEST_CHANGES && counts[chunk] == then[chunk]) {
                row += SHMBUS_REQUEST_CHUNK - 1;
                continue;
            }
        }
        uint64_t number = request_open_row(&segment->c, row);
        if (number != known[row]) {
            py_list_add(&found, Py_BuildValue("(IK)", row, U64(number)));
        }
    }
    PyBuffer_Release(&seen);
    PyBuffer_Release(&numbers);
    return found == NULL ? (Py_XDECREF(now), NULL) : Py_BuildValue("(NN)", now, found);
}

/* request_totals(segment) -> (offered, open, claimed, done, given_up, groups, taken_ns, free_bytes,
 * bytes): samples, unfinished groups, and room for prompts. */
SEGMENT_FUNCTION(py_request_totals, py_take_segment) {
    struct request_totals totals;
    request_total(&segment->c, &totals);
    const struct request_parts *parts = &segment->c.requests;
    return Py_BuildValue("(KKKKKKKKK)", U64(totals.offered), U64(totals.open), U64(totals.claimed),
                         U64(totals.done), U64(totals.given_up), U64(totals.groups),
                         U64(RELAXED(parts->lane->taken_ns)), U64(request_free_bytes(&segment->c)),
                         U64(parts->unit_count) * SHMBUS_REQUEST_UNIT);
}

/* request_bytes(segment) -> int: the lane's size in the segment. */
SEGMENT_FUNCTION(py_request_bytes, py_take_segment) {
    return PyLong_FromSsize_t(segment->c.data - (const uint8_t *)segment->c.requests.lane);
}

/* request_row_count(segment) -> int: the lane's capacity in groups. */
SEGMENT_FUNCTION(py_request_row_count, py_take_segment) {
    return PyLong_FromUnsignedLong(segment->c.requests.row_count);
}

/* ---- The admission table for shmbus.stash.upkeep, on the collector's side, and for messages. */
/* lead_state(segment) -> (limit, held, max_groups, max_versions, a_version): limit 0 means no
 * bound; max_groups 0 and max_versions -1 mean no bound of the respective kind. */
SEGMENT_FUNCTION(py_lead_state, py_take_segment) {
    const struct lead_table *lead = segment->c.lead;
    return Py_BuildValue("(IIIiK)", RELAXED(lead->limit), lead_held(&segment->c), lead->max_groups,
                         (int)lead->max_versions - 1, U64(lead->a_version));
}

static uint64_t key_of(const struct group_name *group) {
    return lead_key(group->id, (uint32_t)group->id_bytes, group->round, group->split);
}

/* lead_leave(segment, id, round, split) -> bool: remove a delivered or otherwise ended group; True
 * if the group had a row. */
GROUP_FUNCTION(py_lead_leave) {
    return PyBool_FromLong(lead_leave(&segment->c, key_of(group)));
}

/* lead_knows(segment, id, round, split) -> bool: True if the group has a row, so its samples need
 * not wait for admission. */
GROUP_FUNCTION(py_lead_knows) {
    return PyBool_FromLong(lead_knows(&segment->c, key_of(group)));
}

/* lead_key(segment, id, round, split) -> int: the word of the group's row once settled. */
GROUP_FUNCTION(py_lead_key) {
    (void)segment;
    return PyLong_FromUnsignedLongLong(key_of(group));
}

/* lead_follow(segment, leased, ended): report groups under lease, and groups ended since the last
 * call. */
static PyObject *py_lead_follow(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned long long leased, ended;
    if (!PyArg_ParseTuple(args, "O&KK", py_take_segment, &segment, &leased, &ended)) {
        return NULL;
    }
    lead_follow(&segment->c, leased, ended);
    Py_RETURN_NONE;
}

/* lead_settled(segment[, id, round, split]) -> {row: word} of groups, or of the named group, whose
 * first record is committed or will never come. */
static PyObject *py_lead_settled(PyObject *Py_UNUSED(module), PyObject *args) {
    struct group_name group;
    bool one = PyTuple_GET_SIZE(args) > 1;
    if (one ? !take_group(args, &group)
            : !PyArg_ParseTuple(args, "O&", py_take_segment, &group.segment)) {
        return NULL;
    }
    SegmentObject *segment = group.segment;
    uint64_t key = one ? key_of(&group) : 0;
    PyObject *found = PyDict_New();
    for (uint32_t row = 0; found != NULL && row < SHMBUS_LEAD_ROWS; row++) {
        row = one ? lead_find_settled(&segment->c, key, row) : row;
        uint64_t word = lead_settled(&segment->c, row);
        if (word != 0) {
            py_dict_put(&found, PyLong_FromUnsignedLong(row), PyLong_FromUnsignedLongLong(word));
        }
    }
    return found;
}

/* lead_free(segment, row, word): free the row of a group absent from the bus; for the collector. */
static PyObject *py_lead_free(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int row;
    unsigned long long word;
    if (!PyArg_ParseTuple(args, "O&IK", py_take_segment, &segment, &row, &word)) {
        return NULL;
    }
    NEVER(row >= SHMBUS_LEAD_ROWS, NULL);
    lead_free(&segment->c, row, word);
    Py_RETURN_NONE;
}

PyMethodDef py_request_functions[] = {
    {"request_offer", py_request_offer, METH_VARARGS, NULL},
    {"request_want", py_request_want, METH_VARARGS, NULL},
    {"request_await", py_request_await, METH_VARARGS, NULL},
    {"request_close", py_request_close, METH_VARARGS, NULL},
    {"request_end", py_request_end, METH_VARARGS, NULL},
    {"request_answered", py_request_answered, METH_VARARGS, NULL},
    {"request_send", py_request_send, METH_VARARGS, NULL},
    {"request_wanted", py_request_wanted, METH_O, NULL},
    {"request_text", py_request_text, METH_VARARGS, NULL},
    {"request_rows", py_request_rows, METH_O, NULL},
    {"request_find", py_request_find, METH_VARARGS, NULL},
    {"request_revoke", py_request_revoke, METH_VARARGS, NULL},
    {"request_bytes", py_request_bytes, METH_O, NULL},
    {"request_row_count", py_request_row_count, METH_O, NULL},
    {"request_number", py_request_number, METH_O, NULL},
    {"request_changes", py_request_changes, METH_VARARGS, NULL},
    {"request_totals", py_request_totals, METH_O, NULL},
    {"lead_state", py_lead_state, METH_O, NULL},
    {"lead_leave", py_lead_leave, METH_VARARGS, NULL},
    {"lead_knows", py_lead_knows, METH_VARARGS, NULL},
    {"lead_key", py_lead_key, METH_VARARGS, NULL},
    {"lead_follow", py_lead_follow, METH_VARARGS, NULL},
    {"lead_settled", py_lead_settled, METH_VARARGS, NULL},
    {"lead_free", py_lead_free, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
