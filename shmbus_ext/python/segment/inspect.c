/* Looking at a segment from outside: its locks, and the records of one run.
 *
 * Invariants: nothing here maps or writes the file. All is read by pread, so that a truncated or
 * sparse file gives a short read and never a signal, and is checked in this process's own copy; a
 * live bus does not notice. What changes while it is read shows as a bad checksum: the caller looks
 * at the run's word again before it calls that damage. */
#include "python/segment/segment.h"

#include <errno.h>
#include <unistd.h>

#include "base/file_lock.h"
#include "ring/layout.h"
#include "ring/record.h"
#include "ring/segment.h"

/* ---- locks ---- */

static PyObject *lock_answer(enum lock_status status) {
    return status == LOCK_ERROR ? PyErr_SetFromErrno(PyExc_OSError)
                                : PyBool_FromLong(status == LOCK_HELD_ELSEWHERE);
}

/* lock_held(fd, byte) -> bool: whether a living process holds it. Works on a read-only fd. */
static PyObject *py_lock_held(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    long long byte;
    if (!PyArg_ParseTuple(args, "iL", &fd, &byte)) {
        return NULL;
    }
    return lock_answer(file_lock_probe(fd, byte));
}

/* any_lock_held(fd) -> bool: the same for every byte there is. */
static PyObject *py_any_lock_held(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd)) {
        return NULL;
    }
    return lock_answer(file_lock_probe_all(fd));
}

/* lock_all(fd) -> bool: whether this description now holds every lock there is. */
static PyObject *py_lock_all(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd)) {
        return NULL;
    }
    enum lock_status status = file_lock_take_all(fd);
    return status == LOCK_ERROR ? PyErr_SetFromErrno(PyExc_OSError)
                                : PyBool_FromLong(status == LOCK_TAKEN);
}

/* ---- records ---- */

struct run_at {
    int fd;
    long long position; /* of the run's first byte in the file */
    unsigned long long used;
    struct record_place place;
};

/* Up to `bytes`; what the file does not have stays as it was, and fails its checksum. */
static void read_some(int fd, void *to, uint64_t bytes, long long position) {
    uint8_t *at = to;
    while (bytes > 0) {
        ssize_t got = pread(fd, at, (size_t)bytes, (off_t)position);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return;
        }
        at += got;
        position += got;
        bytes -= (uint64_t)got;
    }
}

static enum record_verdict read_frame(const struct run_at *run, struct record_header *copy) {
    struct record_header raw;
    memset(&raw, 0, sizeof raw);
    read_some(run->fd, &raw, sizeof raw, run->position + (long long)run->place.offset);
    return record_read_frame(&raw, run->used - run->place.offset, &run->place, copy);
}

struct key {
    uint64_t producer_id, sequence;
};

struct scan {
    struct key *keys;
    uint64_t count, room;
    uint64_t reserved, committed, aborted, released, other;
    uint64_t bytes; /* of committed records */
    uint64_t newest_ns; /* when the newest was committed, released ones too */
    uint64_t at;    /* where the walk ended */
    bool cut;
    bool no_memory;
};

static void count_record(struct scan *scan, const struct record_header *header, uint64_t below) {
    uint32_t state = atomic_load_explicit(&header->state, memory_order_relaxed);
    if ((shmbus_is_committed(state) || state == SHMBUS_RELEASED) &&
        header->committed_ns > scan->newest_ns) {
        scan->newest_ns = header->committed_ns;
    }
    switch (state) {
    case SHMBUS_RESERVED:
        scan->reserved++;
        return;
    case SHMBUS_ABORTED:
        scan->aborted++;
        return;
    case SHMBUS_RELEASED:
        scan->released++;
        return;
    default:
        if (!shmbus_is_committed(state)) {
            scan->other++;
            return;
        }
    }
    if (header->lane_number >= below && !(header->flags & SHMBUS_FLAG_MOVED)) {
        return; /* its owner has not counted it yet */
    }
    if (scan->count == scan->room) {
        uint64_t room = scan->room ? scan->room * 2 : 1024;
        struct key *grown = realloc(scan->keys, room * sizeof *grown);
        if (grown == NULL) {
            scan->no_memory = true;
            return;
        }
        scan->keys = grown;
        scan->room = room;
    }
    scan->keys[scan->count++] = (struct key){header->producer_id, header->sequence};
    scan->committed++;
    scan->bytes += header->record_bytes;
}

static void scan_all(const struct run_at *start, uint64_t below, struct scan *scan) {
    struct run_at run = *start;
    while (run.place.offset < run.used && !scan->no_memory) {
        struct record_header header;
        if (read_frame(&run, &header) != RECORD_OK) {
            scan->cut = true;
            break;
        }
        count_record(scan, &header, below);
        run.place.offset += header.record_bytes;
    }
    scan->at = run.place.offset;
}

/* scan_run(fd, position, used, extent, generation, below) -> (keys, counts, bytes, newest, end,
 * cut)
 *
 * keys: u64 pairs (producer, sequence) of the committed records that are numbered below; counts:
 * (reserved, committed, aborted, released, other). newest: when the last commit was, in ns. cut:
 * the walk met no record at end. */
static PyObject *py_scan_run(PyObject *Py_UNUSED(module), PyObject *args) {
    struct run_at run = {0};
    unsigned long long below;
    if (!PyArg_ParseTuple(args, "iLKIIK", &run.fd, &run.position, &run.used, &run.place.extent,
                          &run.place.generation, &below)) {
        return NULL;
    }
    struct scan scan = {0};
    Py_BEGIN_ALLOW_THREADS
    /* SYNC: record-exposed. The caller has read `used` before this. */
    atomic_thread_fence(memory_order_acquire);
    scan_all(&run, below, &scan);
    Py_END_ALLOW_THREADS
    PyObject *result =
        scan.no_memory
            ? PyErr_NoMemory()
            : Py_BuildValue("y#(KKKKK)KKKN", scan.keys == NULL ? "" : (const char *)scan.keys,
                            (Py_ssize_t)(scan.count * sizeof *scan.keys),
                            (unsigned long long)scan.reserved, (unsigned long long)scan.committed,
                            (unsigned long long)scan.aborted, (unsigned long long)scan.released,
                            (unsigned long long)scan.other, (unsigned long long)scan.bytes,
                            (unsigned long long)scan.newest_ns, (unsigned long long)scan.at,
                            PyBool_FromLong(scan.cut));
    free(scan.keys);
    return result;
}

static const char *state_name(uint32_t state) {
    switch (state) {
    case SHMBUS_RESERVED:
        return "reserved";
    case SHMBUS_ABORTED:
        return "aborted";
    case SHMBUS_RELEASED:
        return "released";
    default:
        return shmbus_is_committed(state) ? "committed" : "unknown";
    }
}

/* The whole record, or its head where the payload need not be checked, in memory of our own. */
static enum record_verdict read_body(const struct run_at *run, struct record_copy *copy,
                                     bool payload, PyObject **image) {
    const struct record_header *header = &copy->header;
    uint64_t bytes = header->record_bytes;
    uint64_t head = sizeof *header + RECORD_SCRATCH_BYTES;
    bool whole = payload && (header->flags & SHMBUS_FLAG_PAYLOAD_CRC);
    if (!whole && bytes > head) {
        bytes = head;
    }
    *image = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (*image == NULL) {
        return RECORD_BAD_HEADER;
    }
    uint8_t *raw = (uint8_t *)PyByteArray_AS_STRING(*image);
    memset(raw, 0, bytes);
    read_some(run->fd, raw, bytes, run->position + (long long)run->place.offset);
    const struct record_header *own = (const struct record_header *)(const void *)raw;
    return whole ? record_read_body(own, copy) : record_read_tables(own, copy);
}

/* (offset, state, verdict, bytes, producer_id, sequence, lane_number, flags, policy_version,
 * version_span, score, group_size, need, index, split, round, committed_ns, meta_offset, meta_bytes,
 * payload_bytes, id, field_count, schema, shape) */
static PyObject *record_row(const struct run_at *run, struct record_copy *copy, bool payload) {
    static const char *const verdicts[] = {"ok", "frame", "header", "payload"};
    struct record_header *h = &copy->header;
    uint32_t state = atomic_load_explicit(&h->state, memory_order_relaxed);
    uint32_t flags = h->flags;
    bool has_body = shmbus_is_committed(state) || state == SHMBUS_RELEASED;
    enum record_verdict verdict = RECORD_OK;
    PyObject *image = NULL;
    if (has_body) {
        verdict = read_body(run, copy, payload, &image);
        if (image == NULL) {
            return NULL;
        }
    }
    bool readable = has_body && verdict != RECORD_BAD_HEADER;
    PyObject *round = h->round == SHMBUS_NO_ROUND || !readable ? Py_NewRef(Py_None)
                                                        : PyLong_FromLongLong(h->round);
    PyObject *id = PyUnicode_DecodeUTF8(readable ? copy->id : "", readable ? h->id_bytes : 0,
                                        "backslashreplace");
    PyObject *row = Py_BuildValue(
        "(KssKKKKILIdIIIINKIIKNIy#y#)", (unsigned long long)run->place.offset, state_name(state),
        verdicts[verdict], (unsigned long long)h->record_bytes,
        (unsigned long long)h->producer_id, (unsigned long long)h->sequence,
        (unsigned long long)h->lane_number, flags, (long long)h->policy_version,
        h->version_span, h->score, (unsigned int)h->group_size, (unsigned int)h->need,
        (unsigned int)h->index, (unsigned int)h->split, round, (unsigned long long)h->committed_ns, h->meta_offset,
        h->meta_bytes, (unsigned long long)h->payload_bytes, id, (unsigned int)h->field_count,
        readable ? (const char *)copy->schema : "",
        (Py_ssize_t)(readable ? h->schema_bytes : 0),
        readable ? (const char *)copy->shape : "",
        (Py_ssize_t)(readable ? h->shape_words * 8u : 0));
    Py_XDECREF(image);
    return row;
}

/* read_run(fd, position, used, extent, generation, start, limit, payload) -> (rows, end, cut) */
static PyObject *py_read_run(PyObject *Py_UNUSED(module), PyObject *args) {
    struct run_at run = {0};
    unsigned long long start, limit;
    int payload;
    if (!PyArg_ParseTuple(args, "iLKIIKKp", &run.fd, &run.position, &run.used, &run.place.extent,
                          &run.place.generation, &start, &limit, &payload)) {
        return NULL;
    }
    /* SYNC: record-exposed. The caller has read `used` before this. */
    atomic_thread_fence(memory_order_acquire);
    struct record_copy *copy = PyMem_Malloc(sizeof *copy);
    PyObject *rows = PyList_New(0);
    if (copy == NULL || rows == NULL) {
        PyMem_Free(copy);
        Py_XDECREF(rows);
        return PyErr_NoMemory();
    }
    bool cut = false;
    run.place.offset = start;
    for (unsigned long long n = 0; rows != NULL && n < limit && run.place.offset < run.used; n++) {
        if (read_frame(&run, &copy->header) != RECORD_OK) {
            cut = true;
            break;
        }
        uint64_t bytes = copy->header.record_bytes;
        PyObject *row = record_row(&run, copy, payload != 0);
        if (row == NULL || PyList_Append(rows, row) < 0) {
            Py_CLEAR(rows);
        }
        Py_XDECREF(row);
        run.place.offset += bytes;
    }
    PyMem_Free(copy);
    return rows == NULL ? NULL
                        : Py_BuildValue("(NKN)", rows, (unsigned long long)run.place.offset,
                                        PyBool_FromLong(cut));
}

static PyMethodDef functions[] = {
    {"layout", py_layout, METH_NOARGS, NULL},
    {"lock_held", py_lock_held, METH_VARARGS, NULL},
    {"any_lock_held", py_any_lock_held, METH_VARARGS, NULL},
    {"lock_all", py_lock_all, METH_VARARGS, NULL},
    {"scan_run", py_scan_run, METH_VARARGS, NULL},
    {"read_run", py_read_run, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_inspect_add_functions(PyObject *module) {
    static const struct {
        const char *name;
        unsigned long long value;
    } constants[] = {
        {"MAGIC", SHMBUS_MAGIC},
        {"HEADER_BYTES", SHMBUS_HEADER_BYTES},
        {"RELEASED_OFFSET", offsetof(struct bus_header, released)},
        {"REASONS", SHMBUS_REASONS},
        {"LOCK_COLLECTOR", SHMBUS_LOCK_COLLECTOR},
        {"LOCK_USERS", SHMBUS_LOCK_USERS},
        {"LOCK_SLOT", SHMBUS_LOCK_SLOT},
        {"LOCK_VIEW", SHMBUS_LOCK_VIEW},
        {"LINK_END", SHMBUS_LINK_END},
        {"REF_OFFSET_BITS", REF_OFFSET_BITS},
        {"FLAG_PAYLOAD_CRC", SHMBUS_FLAG_PAYLOAD_CRC},
        {"FLAG_MOVED", SHMBUS_FLAG_MOVED},
        {"FLAG_FAILED", SHMBUS_FLAG_FAILED},
        {"FLAG_NO_SIZE", SHMBUS_FLAG_NO_SIZE},
        {"FLAGS_KEPT", SHMBUS_FLAGS_KEPT},
        {"RETRY_BUSY", SHMBUS_RETRY_BUSY},
        {"RETRY_PAUSE", SHMBUS_RETRY_PAUSE},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(constants[i].value);
        if (value == NULL || PyModule_AddObjectRef(module, constants[i].name, value) < 0) {
            Py_XDECREF(value);
            return false;
        }
        Py_DECREF(value);
    }
    return PyModule_AddFunctions(module, functions) == 0;
}

/* ---- The tables of layout_tables.h: each shared field by name, offset, size and kind.
 *
 * Invariant: no number is written down here; the compiler fills them in from layout.h. */
struct field_note {
    const char *name;
    size_t offset;
    size_t bytes;
    char kind; /* as numpy has it: u, i, f, S, V */
};

#define NAMED(name, type, field, kind)                                                        \
    {name, offsetof(struct type, field), sizeof(((struct type *)0)->field), kind}
#define FIELD(type, field, kind) NAMED(#field, type, field, kind)

static const struct field_note header_fields[] = {
    FIELD(bus_header, magic, 'u'),
    FIELD(bus_header, layout_version, 'u'),
    FIELD(bus_header, layout_hash, 'u'),
    FIELD(bus_header, segment_bytes, 'u'),
    FIELD(bus_header, data_offset, 'u'),
    FIELD(bus_header, extent_bytes, 'u'),
    FIELD(bus_header, extent_count, 'u'),
    FIELD(bus_header, max_producers, 'u'),
    FIELD(bus_header, created_unix_ns, 'u'),
    FIELD(bus_header, geometry_crc, 'u'),
    FIELD(bus_header, bell, 'u'),
    NAMED("space_bell", bus_header, space_bell.count, 'u'),
    NAMED("space_wanted", bus_header, space_bell.wanted, 'u'),
    FIELD(bus_header, next_producer_id, 'u'),
    FIELD(bus_header, attach_epoch, 'u'),
    FIELD(bus_header, policy_version, 'i'),
    FIELD(bus_header, consumer_packs, 'u'),
    FIELD(bus_header, collector_pid, 'u'),
    FIELD(bus_header, collector_leased_groups, 'u'),
    FIELD(bus_header, collector_leased_records, 'u'),
    FIELD(bus_header, collector_stashed_groups, 'u'),
    FIELD(bus_header, collector_stashed_records, 'u'),
    FIELD(bus_header, collector_seen_ns, 'u'),
    FIELD(bus_header, collector_lease_ns, 'u'),
    FIELD(bus_header, collector_label, 'S'),
    FIELD(bus_header, intent_count, 'u'),
    FIELD(bus_header, intent_reason, 'u'),
    FIELD(bus_header, intent_base, 'u'),
    FIELD(bus_header, intent_crc, 'u'),
    FIELD(bus_header, intent_split, 'u'),
    FIELD(bus_header, intent_split_base, 'u'),
    FIELD(bus_header, free_span, 'u'),
    FIELD(bus_header, free_first, 'u'),
    FIELD(bus_header, paused, 'u'),
    FIELD(bus_header, pause_policy_version, 'i'),
    FIELD(bus_header, pause_unix_ns, 'u'),
    FIELD(bus_header, pause_reason, 'S'),
    FIELD(bus_header, retries_open, 'u'),
    FIELD(bus_header, groups_failed, 'u'),
    FIELD(bus_header, next_round, 'u'),
    FIELD(bus_header, cancelled_count, 'u'),
    FIELD(bus_header, leased_in_part, 'u'),
    FIELD(bus_header, identity, 'V'),
    FIELD(bus_header, ancestors, 'V'),
    {NULL, 0, 0, 0},
};

static const struct field_note slot_fields[] = {
    FIELD(producer_slot, committed, 'u'),
    FIELD(producer_slot, aborted, 'u'),
    FIELD(producer_slot, first, 'u'),
    FIELD(producer_slot, current, 'u'),
    FIELD(producer_slot, next_order, 'u'),
    FIELD(producer_slot, producer_id, 'u'),
    FIELD(producer_slot, state, 'u'),
    FIELD(producer_slot, pid, 'u'),
    FIELD(producer_slot, label, 'S'),
    FIELD(producer_slot, committing, 'u'),
    FIELD(producer_slot, commit_ref, 'u'),
    FIELD(producer_slot, commit_generation, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note extent_fields[] = {
    FIELD(extent_desc, word, 'u'),   FIELD(extent_desc, order, 'u'),
    FIELD(extent_desc, used, 'u'),   FIELD(extent_desc, next, 'u'),
    FIELD(extent_desc, span, 'u'),   FIELD(extent_desc, sealed, 'u'),
    FIELD(extent_desc, writer_pins, 'u'), FIELD(extent_desc, producer_id, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note retry_fields[] = {
    FIELD(retry_entry, claim, 'u'),      FIELD(retry_entry, number, 'u'),
    FIELD(retry_entry, round, 'i'),      FIELD(retry_entry, asked_ns, 'u'),
    FIELD(retry_entry, group_size, 'u'), FIELD(retry_entry, index, 'u'),
    FIELD(retry_entry, attempt, 'u'),    FIELD(retry_entry, id_bytes, 'u'),
    FIELD(retry_entry, reason_bytes, 'u'), FIELD(retry_entry, need, 'u'),
    FIELD(retry_entry, split, 'u'),       FIELD(retry_entry, crc, 'u'),
    FIELD(retry_entry, id, 'S'),         FIELD(retry_entry, reason, 'S'),
    {NULL, 0, 0, 0},
};

static const struct field_note split_fields[] = {
    FIELD(split_entry, label, 'S'),        FIELD(split_entry, acked, 'u'),
    FIELD(split_entry, dropped, 'u'),      FIELD(split_entry, stashed, 'u'),
    FIELD(split_entry, ready_groups, 'u'), FIELD(split_entry, open_groups, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note schema_fields[] = {
    FIELD(schema_entry, name_bytes, 'u'),
    FIELD(schema_entry, dtype_bytes, 'u'),
    FIELD(schema_entry, itemsize, 'u'),
    FIELD(schema_entry, ndim, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note declared_fields[] = {
    FIELD(declared_part, bytes, 'u'), FIELD(declared_part, crc, 'u'),
    FIELD(declared_part, text, 'S'),  {NULL, 0, 0, 0},
};

static const struct field_note declared_entry_fields[] = {
    FIELD(declared_entry, name_bytes, 'u'), FIELD(declared_entry, dtype_bytes, 'u'),
    FIELD(declared_entry, itemsize, 'u'),   FIELD(declared_entry, ndim, 'u'),
    FIELD(declared_entry, flags, 'u'),      {NULL, 0, 0, 0},
};

static const struct field_note begun_fields[] = {
    FIELD(begun_row, owner, 'u'), FIELD(begun_row, key, 'u'),
    FIELD(begun_row, begun_ns, 'u'), FIELD(begun_row, index, 'u'),
    {NULL, 0, 0, 0},
};

static const struct {
    const char *name;
    const struct field_note *fields;
    size_t bytes;
} structs[] = {
    {"bus_header", header_fields, sizeof(struct bus_header)},
    {"producer_slot", slot_fields, sizeof(struct producer_slot)},
    {"extent_desc", extent_fields, sizeof(struct extent_desc)},
    {"retry_entry", retry_fields, sizeof(struct retry_entry)},
    {"split_entry", split_fields, sizeof(struct split_entry)},
    {"schema_entry", schema_fields, sizeof(struct schema_entry)},
    {"declared_part", declared_fields, sizeof(struct declared_part)},
    {"begun_row", begun_fields, sizeof(struct begun_row)},
    {"declared_entry", declared_entry_fields, sizeof(struct declared_entry)},
};

static bool add_field(PyObject *names, PyObject *formats, PyObject *offsets,
                      const struct field_note *field) {
    PyObject *name = PyUnicode_FromString(field->name);
    PyObject *format = PyUnicode_FromFormat(field->kind == 'S' || field->kind == 'V' ? "%c%zu"
                                                                                      : "<%c%zu",
                                            field->kind, field->bytes);
    PyObject *offset = PyLong_FromSize_t(field->offset);
    bool added = name != NULL && format != NULL && offset != NULL &&
                 PyList_Append(names, name) == 0 && PyList_Append(formats, format) == 0 &&
                 PyList_Append(offsets, offset) == 0;
    Py_XDECREF(name);
    Py_XDECREF(format);
    Py_XDECREF(offset);
    return added;
}

PyObject *py_layout(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    PyObject *result = PyDict_New();
    for (size_t i = 0; i < sizeof structs / sizeof *structs && result != NULL; i++) {
        PyObject *names = PyList_New(0), *formats = PyList_New(0), *offsets = PyList_New(0);
        bool built = names != NULL && formats != NULL && offsets != NULL;
        for (const struct field_note *f = structs[i].fields; built && f->name != NULL; f++) {
            built = add_field(names, formats, offsets, f);
        }
        PyObject *entry =
            built ? Py_BuildValue("{s:O,s:O,s:O,s:n}", "names", names, "formats", formats,
                                  "offsets", offsets, "itemsize", (Py_ssize_t)structs[i].bytes)
                  : NULL;
        if (entry == NULL || PyDict_SetItemString(result, structs[i].name, entry) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(entry);
        Py_XDECREF(names);
        Py_XDECREF(formats);
        Py_XDECREF(offsets);
    }
    return result;
}

/* ---- The sizes of a segment that is not made yet, for whoever decides whether to make it. */
/* segment_plan(capacity, max_producers, extent_bytes) ->
 * (segment bytes, bytes of an extent, extents, producers that get one each), or None where no
 * segment can be laid out. */
static PyObject *py_segment_plan(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long capacity, extent_bytes;
    unsigned int max_producers;
    struct segment_geometry plan;
    if (!PyArg_ParseTuple(args, "KIK", &capacity, &max_producers, &extent_bytes)) {
        return NULL;
    }
    if (!segment_plan(capacity, max_producers, extent_bytes, &plan)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(KKII)", (unsigned long long)plan.segment_bytes,
                         (unsigned long long)plan.extent_bytes, plan.extent_count,
                         plan.extent_count - reserved_extents(plan.extent_count));
}

/* ---- next_round, for shmbus.Producer. */
/* next_round(segment): a number that this bus has handed out to nobody else. */
static PyObject *py_next_round(PyObject *Py_UNUSED(module), PyObject *object) {
    if (!PyObject_TypeCheck(object, &SegmentType)) {
        PyErr_SetString(PyExc_TypeError, "expected a Segment");
        return NULL;
    }
    SegmentObject *segment = (SegmentObject *)object;
    if (!py_segment_usable(segment, "handle")) {
        return NULL;
    }
    if (segment->c.read_only) {
        PyErr_Format(PyExc_TypeError, "bus '%U' is mapped read-only here", segment->name);
        return NULL;
    }
    return PyLong_FromLongLong(shmbus_next_round(segment->c.header));
}

static PyMethodDef segment_functions[] = {
    {"segment_plan", py_segment_plan, METH_VARARGS, NULL},
    {"next_round", py_next_round, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_rounds_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, segment_functions) == 0;
}
