/* The request lane for shmbus.feeder, and for shmbus.stash.requests, the collector's side. */
#include "python/requests/requests.h"

#include <errno.h>

#include "python/segment/segment.h"
#include "ring/lead.h"
#include "ring/request_feed.h"
#include "ring/request_parts.h"
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
static PyObject *py_request_offer(PyObject *Py_UNUSED(module), PyObject *args) {
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
static PyObject *py_request_want(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *object;
    SegmentObject *segment;
    int room;
    if (!PyArg_ParseTuple(args, "Op", &object, &room) || !py_take_segment(object, &segment)) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(bell_announce(bell_of(segment, room)));
}

/* request_await(segment, room, ticket, timeout_s): sleeps until the bell is rung after it. */
static PyObject *py_request_await(PyObject *Py_UNUSED(module), PyObject *args) {
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
static PyObject *py_request_close(PyObject *Py_UNUSED(module), PyObject *args) {
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
static PyObject *py_request_end(PyObject *Py_UNUSED(module), PyObject *args) {
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
static PyObject *py_request_text(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int row;
    unsigned long long number;
    return take_row(args, &segment, &row, &number) ? py_describe_request(segment, row, number)
                                                   : NULL;
}

/* request_rows(segment) -> list of (row, number, admitted, open, claimed, done), oldest first by
 * number where the caller sorts. */
static PyObject *py_request_rows(PyObject *Py_UNUSED(module), PyObject *object) {
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
static PyObject *py_request_find(PyObject *Py_UNUSED(module), PyObject *args) {
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
static PyObject *py_request_since(PyObject *Py_UNUSED(module), PyObject *args) {
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
static PyObject *py_request_number(PyObject *Py_UNUSED(module), PyObject *object) {
    SegmentObject *segment;
    if (!py_take_segment(object, &segment)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(
        atomic_load_explicit(&segment->c.requests.lane->number, memory_order_acquire));
}

/* request_totals(segment) -> (offered, open, claimed, done, given_up, groups, taken_ns, free_bytes,
 * bytes): samples, groups that have not ended, and room for prompts. */
static PyObject *py_request_totals(PyObject *Py_UNUSED(module), PyObject *object) {
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
static PyObject *py_request_bytes(PyObject *Py_UNUSED(module), PyObject *object) {
    SegmentObject *segment;
    if (!py_take_segment(object, &segment)) {
        return NULL;
    }
    return PyLong_FromSsize_t(segment->c.data - (const uint8_t *)segment->c.requests.lane);
}

/* ---- The admission table for shmbus.stash.upkeep, the collector's side, and for what others say of it. */
/* lead_state(segment) -> (limit, held, max_groups, max_versions, a_version): limit 0 for no bound,
 * max_groups 0 and max_versions -1 for none of that kind. */
static PyObject *py_lead_state(PyObject *Py_UNUSED(module), PyObject *object) {
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
static PyObject *py_lead_leave(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    uint64_t key;
    return take_key(args, &segment, &key) ? PyBool_FromLong(lead_leave(&segment->c, key))
                                                  : NULL;
}

/* lead_knows(segment, id, round, split) -> bool: whether a sample of that group waits for no other. */
static PyObject *py_lead_knows(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    uint64_t key;
    return take_key(args, &segment, &key) ? PyBool_FromLong(lead_knows(&segment->c, key))
                                                  : NULL;
}

/* lead_key(segment, id, round, split) -> int: the word of that group's row once it is settled. */
static PyObject *py_lead_key(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    uint64_t key;
    return take_key(args, &segment, &key) ? PyLong_FromUnsignedLongLong(key) : NULL;
}

/* lead_follow(segment, leased, ended): groups that are leased, and those that have ended since the
 * last call; for the collector. */
static PyObject *py_lead_follow(PyObject *Py_UNUSED(module), PyObject *args) {
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
static PyObject *py_lead_settled(PyObject *Py_UNUSED(module), PyObject *object) {
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
static PyObject *py_lead_free(PyObject *Py_UNUSED(module), PyObject *args) {
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

/* ---- Arguments. */
bool py_take_segment(PyObject *object, SegmentObject **segment) {
    if (!PyObject_TypeCheck(object, &SegmentType)) {
        PyErr_SetString(PyExc_TypeError, "expected a Segment");
        return false;
    }
    *segment = (SegmentObject *)object;
    return py_segment_usable(*segment, "handle");
}

bool py_take_round(PyObject *object, int64_t *round) {
    if (object == Py_None) {
        *round = SHMBUS_NO_ROUND;
        return true;
    }
    *round = PyLong_AsLongLong(object);
    return *round != -1 || !PyErr_Occurred();
}

/* ---- Where the fields of the lead table, of the relay's journal and of the request lane lie, from the structs themselves. */
struct field_note {
    const char *name;
    size_t offset;
    size_t bytes;
    char kind; /* u, i or V */
};
#define FIELD(type, field, kind) \
    {#field, offsetof(struct type, field), sizeof(((struct type *)0)->field), kind}

static const struct field_note lead_fields[] = {
    FIELD(lead_table, limit, 'u'),     FIELD(lead_table, max_groups, 'u'),
    FIELD(lead_table, max_versions, 'u'), FIELD(lead_table, version, 'i'),
    FIELD(lead_table, ended, 'u'),     FIELD(lead_table, ended_before, 'u'),
    FIELD(lead_table, a_version, 'u'), {NULL, 0, 0, 0},
};

static const struct field_note lane_fields[] = {
    FIELD(request_lane, taken_ns, 'u'),     FIELD(request_lane, feeding, 'u'),
    FIELD(request_lane, number, 'u'),       FIELD(request_lane, offered, 'u'),
    FIELD(request_lane, done, 'u'),         FIELD(request_lane, given_up, 'u'),
    FIELD(request_lane, freeing, 'u'),      FIELD(request_lane, freeing_done, 'u'),
    FIELD(request_lane, freeing_given_up, 'u'), FIELD(request_lane, returned, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note row_fields[] = {
    FIELD(request_row, word, 'u'),       FIELD(request_row, place, 'u'),
    FIELD(request_row, round, 'i'),      FIELD(request_row, offered_ns, 'u'),
    FIELD(request_row, offered, 'u'),    FIELD(request_row, first_cell, 'u'),
    FIELD(request_row, first_unit, 'u'), FIELD(request_row, data_bytes, 'u'),
    FIELD(request_row, data_crc, 'u'),   FIELD(request_row, group_size, 'u'),
    FIELD(request_row, need, 'u'),       FIELD(request_row, id_bytes, 'u'),
    FIELD(request_row, split, 'u'), FIELD(request_row, level, 'u'),
    FIELD(request_row, crc, 'u'),        FIELD(request_row, next, 'u'),
    FIELD(request_row, returned, 'u'),   FIELD(request_row, admitted, 'u'),
    FIELD(request_row, ended_done, 'u'), FIELD(request_row, ended_given_up, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note cell_fields[] = {
    FIELD(request_cell, claim, 'u'),
    FIELD(request_cell, commit, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note journal_fields[] = {
    FIELD(relay_journal, writer, 'u'),      FIELD(relay_journal, slot, 'u'),
    FIELD(relay_journal, batch, 'u'),       FIELD(relay_journal, incarnation, 'u'),
    FIELD(relay_journal, source_incarnation, 'u'), FIELD(relay_journal, term, 'i'),
    FIELD(relay_journal, ended, 'u'),       FIELD(relay_journal, seen_ns, 'u'),
    FIELD(relay_journal, figures, 'V'),     FIELD(relay_journal, sources, 'V'),
    {NULL, 0, 0, 0},
};

static const struct field_note entry_fields[] = {
    FIELD(relay_entry, word, 'u'),   FIELD(relay_entry, producer_id, 'u'),
    FIELD(relay_entry, sequence, 'u'), FIELD(relay_entry, writer, 'u'),
    FIELD(relay_entry, commit, 'u'), FIELD(relay_entry, ended, 'u'),
    {NULL, 0, 0, 0},
};

static const struct {
    const char *name;
    const struct field_note *fields;
    size_t bytes;
} structs[] = {
    {"lead_table", lead_fields, sizeof(struct lead_table)},
    {"relay_journal", journal_fields, sizeof(struct relay_journal)},
    {"relay_entry", entry_fields, sizeof(struct relay_entry)},
    {"request_lane", lane_fields, sizeof(struct request_lane)},
    {"request_row", row_fields, sizeof(struct request_row)},
    {"request_cell", cell_fields, sizeof(struct request_cell)},
};

static bool append(PyObject *list, PyObject *item) {
    bool added = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return added;
}

static PyObject *describe(const struct field_note *fields, size_t bytes) {
    PyObject *names = PyList_New(0), *formats = PyList_New(0), *offsets = PyList_New(0);
    bool good = names != NULL && formats != NULL && offsets != NULL;
    for (const struct field_note *f = fields; good && f->name != NULL; f++) {
        good = append(names, PyUnicode_FromString(f->name)) &&
               append(formats, PyUnicode_FromFormat(f->kind == 'V' ? "%c%zu" : "<%c%zu", f->kind,
                                              f->bytes)) &&
               append(offsets, PyLong_FromSize_t(f->offset));
    }
    PyObject *result = good ? Py_BuildValue("{s:O,s:O,s:O,s:n}", "names", names, "formats", formats,
                                            "offsets", offsets, "itemsize", (Py_ssize_t)bytes)
                            : NULL;
    Py_XDECREF(names);
    Py_XDECREF(formats);
    Py_XDECREF(offsets);
    return result;
}

/* request_layout() -> {struct: {"names", "formats", "offsets", "itemsize"}}, as layout(). */
static PyObject *py_request_layout(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    PyObject *result = PyDict_New();
    for (size_t i = 0; i < sizeof structs / sizeof *structs && result != NULL; i++) {
        PyObject *entry = describe(structs[i].fields, structs[i].bytes);
        if (entry == NULL || PyDict_SetItemString(result, structs[i].name, entry) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(entry);
    }
    return result;
}

/* request_divide(bytes) -> {"rows", "row_count", "cells", "units", "unit_count"}: offsets from the
 * lane's beginning, and counts; None where the bytes are too few. */
static PyObject *py_request_divide(PyObject *Py_UNUSED(module), PyObject *argument) {
    unsigned long long bytes = PyLong_AsUnsignedLongLong(argument);
    if (bytes == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    struct request_parts parts;
    static uint8_t at[1]; /* never dereferenced: offsets from it are all that is used */
    if (bytes > SHMBUS_REQUEST_MAX_BYTES + SHMBUS_PAGE || !request_divide(&parts, at, bytes)) {
        Py_RETURN_NONE;
    }
    uintptr_t base = (uintptr_t)at;
    return Py_BuildValue("{s:K,s:I,s:K,s:K,s:I}", "rows",
                         (unsigned long long)((uintptr_t)parts.rows - base), "row_count",
                         parts.row_count, "cells",
                         (unsigned long long)((uintptr_t)parts.cells - base), "units",
                         (unsigned long long)((uintptr_t)parts.units - base), "unit_count",
                         parts.unit_count);
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
    {"lead_state", py_lead_state, METH_O, NULL},
    {"lead_leave", py_lead_leave, METH_VARARGS, NULL},
    {"lead_knows", py_lead_knows, METH_VARARGS, NULL},
    {"lead_key", py_lead_key, METH_VARARGS, NULL},
    {"lead_follow", py_lead_follow, METH_VARARGS, NULL},
    {"lead_settled", py_lead_settled, METH_O, NULL},
    {"lead_free", py_lead_free, METH_VARARGS, NULL},
    {"request_layout", py_request_layout, METH_NOARGS, NULL},
    {"request_divide", py_request_divide, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_request_add_functions(PyObject *module) {
    static const struct named_value constants[] = {
        {"REQUEST_LEVELS", SHMBUS_REQUEST_LEVELS},
        {"REQUEST_UNIT", SHMBUS_REQUEST_UNIT},
        {"REQUEST_MIN_BYTES", (long)SHMBUS_REQUEST_MIN_BYTES},
        {"REQUEST_MAX_BYTES", (long)SHMBUS_REQUEST_MAX_BYTES},
        {"LEAD_ROWS", SHMBUS_LEAD_ROWS},
    };
    return ADD_CONSTANTS(module, constants) && PyModule_AddFunctions(module, functions) == 0;
}
