/* A segment seen from outside: its locks, and the records of one run.
 *
 * Invariants: inspection neither maps nor writes the file. Reads go through pread, so a truncated
 * or sparse file yields a short read and never a signal, and checks run on this process's own copy,
 * invisible to a live bus. A change during the read shows as a bad checksum: the caller rereads the
 * run's word before reporting damage. */
#include "python/segment/segment.h"

#include <errno.h>
#include <unistd.h>

#include "base/file_lock.h"
#include "ring/relay_journal.h"

/* ---- locks ---- */

/* lock_held(fd, byte, bytes=1) -> bool: True if a living process holds a lock in the range; 0 bytes
 * reach to the end of every file. Works on a read-only fd. */
static PyObject *py_lock_held(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    long long byte, bytes = 1;
    if (!PyArg_ParseTuple(args, "iL|L", &fd, &byte, &bytes)) {
        return NULL;
    }
    int64_t start = byte, length = bytes;
    enum lock_status status = file_lock_find(fd, &start, &length);
    return status == LOCK_ERROR ? PyErr_SetFromErrno(PyExc_OSError)
                                : PyBool_FromLong(status == LOCK_HELD_ELSEWHERE);
}

/* lock_all(fd) -> bool: True if this description now holds every lock. */
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

/* Read up to `bytes`; bytes beyond the file's end keep their old value and fail the checksum. */
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
    uint64_t reserved;
    uint64_t newest_ns; /* latest commit, including released records */
    bool no_memory;
};

static void count_record(struct scan *scan, const struct record_header *header, uint64_t below) {
    uint32_t state = RELAXED(header->state);
    if ((shmbus_is_committed(state) || state == SHMBUS_RELEASED) &&
        header->committed_ns > scan->newest_ns) {
        scan->newest_ns = header->committed_ns;
    }
    scan->reserved += state == SHMBUS_RESERVED;
    bool counted = header->lane_number < below || (header->flags & SHMBUS_FLAG_MOVED) != 0;
    if (!shmbus_is_committed(state) || !counted) { /* not yet counted by its owner */
        return;
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
}

static void scan_all(const struct run_at *start, uint64_t below, struct scan *scan) {
    struct run_at run = *start;
    while (run.place.offset < run.used && !scan->no_memory) {
        struct record_header header;
        if (read_frame(&run, &header) != RECORD_OK) {
            break;
        }
        count_record(scan, &header, below);
        run.place.offset += header.record_bytes;
    }
}

/* scan_run(fd, position, used, extent, generation, below) -> (keys, reserved, newest): u64 pairs
 * (producer, sequence) of the committed records numbered below `below`; the number of open
 * reservations; the time of the last commit, in ns. */
static PyObject *py_scan_run(PyObject *Py_UNUSED(module), PyObject *args) {
    struct run_at run = {0};
    unsigned long long below;
    if (!PyArg_ParseTuple(args, "iLKIIK", &run.fd, &run.position, &run.used, &run.place.extent,
                          &run.place.generation, &below)) {
        return NULL;
    }
    struct scan scan = {0};
    Py_BEGIN_ALLOW_THREADS
    /* SYNC: record-exposed. The caller read `used` before. */
    atomic_thread_fence(memory_order_acquire);
    scan_all(&run, below, &scan);
    Py_END_ALLOW_THREADS PyObject *result =
        scan.no_memory
            ? PyErr_NoMemory()
            : Py_BuildValue("y#KK", scan.keys == NULL ? "" : (const char *)scan.keys,
                            (Py_ssize_t)(scan.count * sizeof *scan.keys), U64(scan.reserved),
                            U64(scan.newest_ns));
    free(scan.keys);
    return result;
}

/* Read the whole record, or only its head if the payload needs no check, into private memory. */
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

/* (offset, committed, intact, bytes, producer_id, sequence, lane_number, flags, policy_version,
 * version_span, score, group_size, need, index, split, round, committed_ns, meta_offset, meta_bytes,
 * payload_bytes, id, schema, shape) */
static PyObject *record_row(const struct run_at *run, struct record_copy *copy, bool payload) {
    struct record_header *h = &copy->header;
    bool committed = shmbus_is_committed(RELAXED(h->state));
    uint32_t flags = h->flags;
    PyObject *image = NULL;
    enum record_verdict verdict = read_body(run, copy, payload, &image);
    if (image == NULL) {
        return NULL;
    }
    bool readable = verdict != RECORD_BAD_HEADER;
    PyObject *round = py_round(readable ? h->round : SHMBUS_NO_ROUND);
    PyObject *id = PyUnicode_DecodeUTF8(readable ? copy->id : "", readable ? h->id_bytes : 0,
                                        "backslashreplace");
    PyObject *row = Py_BuildValue(
        "(KNNKKKKILIdIIIINKIIKNy#y#)", U64(run->place.offset), PyBool_FromLong(committed),
        PyBool_FromLong(verdict == RECORD_OK), U64(h->record_bytes), U64(h->producer_id),
        U64(h->sequence), U64(h->lane_number), flags, (long long)h->policy_version, h->version_span,
        h->score,
        (unsigned int)h->group_size, (unsigned int)h->need, (unsigned int)h->index,
        (unsigned int)h->split, round, U64(h->committed_ns), h->meta_offset, h->meta_bytes,
        U64(h->payload_bytes), id, readable ? (const char *)copy->schema : "",
        (Py_ssize_t)(readable ? h->schema_bytes : 0), readable ? (const char *)copy->shape : "",
        (Py_ssize_t)(readable ? h->shape_words * 8u : 0));
    Py_DECREF(image);
    return row;
}

/* read_run(fd, position, used, extent, generation, start, limit, payload) -> (rows, end, cut): the
 * committed and the released records among the next `limit`. */
static PyObject *py_read_run(PyObject *Py_UNUSED(module), PyObject *args) {
    struct run_at run = {0};
    unsigned long long start, limit;
    int payload;
    if (!PyArg_ParseTuple(args, "iLKIIKKp", &run.fd, &run.position, &run.used, &run.place.extent,
                          &run.place.generation, &start, &limit, &payload)) {
        return NULL;
    }
    /* SYNC: record-exposed. The caller read `used` before. */
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
        uint32_t state = RELAXED(copy->header.state);
        if (shmbus_is_committed(state) || state == SHMBUS_RELEASED) {
            py_list_add(&rows, record_row(&run, copy, payload != 0));
        }
        run.place.offset += bytes;
    }
    PyMem_Free(copy);
    return rows == NULL ? NULL
                        : Py_BuildValue("(NKN)", rows, U64(run.place.offset), PyBool_FromLong(cut));
}

/* ---- The tables of layout_tables.h: every shared field by name, offset, size and kind.
 *
 * Invariant: the tables contain no literal numbers; the compiler fills them in from layout.h. */
struct field_note {
    const char *name;
    size_t offset;
    size_t bytes;
    char kind; /* numpy's code: u, i, f, S, V */
};

/* Field of the struct OF, defined before every table. */
#define NAMED(name, field, kind) \
    {name, offsetof(struct OF, field), sizeof(((struct OF *)0)->field), kind}
#define UINT(field) NAMED(#field, field, 'u')
#define INT(field) NAMED(#field, field, 'i')
#define TEXT(field) NAMED(#field, field, 'S')
#define BYTES(field) NAMED(#field, field, 'V')

static const struct {
    const char *name;
    size_t bytes;
    const struct field_note *fields;
} structs[] = {
#define OF bus_header
    {"bus_header", sizeof(struct OF), (const struct field_note[]){
        UINT(magic),
        UINT(layout_version),
        UINT(layout_hash),
        UINT(segment_bytes),
        UINT(data_offset),
        UINT(extent_bytes),
        UINT(extent_count),
        UINT(max_producers),
        UINT(created_unix_ns),
        UINT(geometry_crc),
        UINT(bell),
        NAMED("space_bell", space_bell.count, 'u'),
        NAMED("space_wanted", space_bell.wanted, 'u'),
        UINT(next_producer_id),
        UINT(attach_epoch),
        UINT(look_slot),
        UINT(next_look_ns),
        BYTES(stall_told_ns),
        INT(policy_version),
        UINT(consumer_packs),
        UINT(collector_pid),
        UINT(collector_leased_groups),
        UINT(collector_leased_records),
        UINT(collector_stashed_groups),
        UINT(collector_stashed_records),
        UINT(collector_seen_ns),
        UINT(collector_lease_ns),
        TEXT(collector_label),
        UINT(intent_count),
        UINT(intent_reason),
        UINT(intent_base),
        UINT(intent_crc),
        UINT(intent_split),
        UINT(intent_split_base),
        UINT(free_span),
        UINT(free_first),
        UINT(paused),
        INT(pause_policy_version),
        UINT(pause_unix_ns),
        TEXT(pause_reason),
        UINT(retries_open),
        UINT(groups_failed),
        UINT(next_round),
        UINT(cancelled_count),
        UINT(leased_in_part),
        BYTES(identity),
        BYTES(ancestors),
        {NULL, 0, 0, 0}
    }},
#undef OF

#define OF producer_slot
    {"producer_slot", sizeof(struct OF), (const struct field_note[]){
        UINT(committed),  UINT(aborted),     UINT(first),      UINT(current),
        UINT(next_order), UINT(producer_id), UINT(state),      UINT(pid),
        TEXT(label),      UINT(committing),  UINT(commit_ref), UINT(commit_generation),
        {NULL, 0, 0, 0}
    }},
#undef OF

#define OF extent_desc
    {"extent_desc", sizeof(struct OF), (const struct field_note[]){
        UINT(word),   UINT(order),       UINT(used),        UINT(next),      UINT(span),
        UINT(sealed), UINT(writer_pins), UINT(producer_id), {NULL, 0, 0, 0}
    }},
#undef OF

#define OF retry_entry
    {"retry_entry", sizeof(struct OF), (const struct field_note[]){
        UINT(claim), UINT(number),  INT(round),     UINT(asked_ns),     UINT(group_size),
        UINT(index), UINT(attempt), UINT(id_bytes), UINT(reason_bytes), UINT(need),
        UINT(split), UINT(late),    UINT(crc),      TEXT(id),           TEXT(reason),
        {NULL, 0, 0, 0}
    }},
#undef OF

#define OF split_entry
    {"split_entry", sizeof(struct OF), (const struct field_note[]){
        TEXT(label),        UINT(acked),       UINT(dropped),   UINT(stashed),
        UINT(ready_groups), UINT(open_groups), {NULL, 0, 0, 0}
    }},
#undef OF

#define OF schema_entry
    {"schema_entry", sizeof(struct OF), (const struct field_note[]){
        UINT(name_bytes), UINT(dtype_bytes), UINT(itemsize), UINT(ndim), {NULL, 0, 0, 0}
    }},
#undef OF

#define OF declared_part
    {"declared_part", sizeof(struct OF), (const struct field_note[]){
        UINT(bytes),
        UINT(crc),
        TEXT(text),
        {NULL, 0, 0, 0}
    }},
#undef OF

#define OF declared_entry
    {"declared_entry", sizeof(struct OF), (const struct field_note[]){
        UINT(name_bytes), UINT(dtype_bytes), UINT(itemsize), UINT(ndim), UINT(flags), {NULL, 0, 0, 0}
    }},
#undef OF

#define OF wait_row
    {"wait_row", sizeof(struct OF), (const struct field_note[]){
        BYTES(ns),     UINT(released), UINT(given_back), UINT(failed), UINT(rests_until_ns),
        TEXT(reason),  {NULL, 0, 0, 0}
    }},
#undef OF

#define OF lead_table
    {"lead_table", sizeof(struct OF), (const struct field_note[]){
        UINT(limit), UINT(max_groups),   UINT(max_versions), INT(version),
        UINT(ended), UINT(ended_before), UINT(a_version),    {NULL, 0, 0, 0}
    }},
#undef OF

#define OF request_lane
    {"request_lane", sizeof(struct OF), (const struct field_note[]){
        UINT(taken_ns),  UINT(feeding), UINT(number),       UINT(offered),          UINT(done),
        UINT(given_up),  UINT(freeing), UINT(freeing_done), UINT(freeing_given_up), UINT(returned),
        {NULL, 0, 0, 0}
    }},
#undef OF

#define OF request_row
    {"request_row", sizeof(struct OF), (const struct field_note[]){
        UINT(word),       UINT(place),      INT(round),       UINT(offered_ns), UINT(offered),
        UINT(first_cell), UINT(first_unit), UINT(data_bytes), UINT(data_crc),   UINT(group_size),
        UINT(need),       UINT(id_bytes),   UINT(split),      UINT(level),      UINT(crc),
        UINT(next),       UINT(returned),   UINT(admitted),   UINT(ended_done), UINT(ended_given_up),
        {NULL, 0, 0, 0}
    }},
#undef OF

#define OF request_cell
    {"request_cell", sizeof(struct OF), (const struct field_note[]){
        UINT(claim),
        UINT(commit),
        {NULL, 0, 0, 0}
    }},
#undef OF

#define OF relay_journal
    {"relay_journal", sizeof(struct OF), (const struct field_note[]){
        UINT(writer),    UINT(slot),  UINT(batch),   UINT(incarnation), UINT(source_incarnation),
        INT(term),       UINT(ended), UINT(seen_ns), BYTES(figures),
        {NULL, 0, 0, 0}
    }},
#undef OF

#define OF relay_entry
    {"relay_entry", sizeof(struct OF), (const struct field_note[]){
        UINT(word),   UINT(producer_id), UINT(sequence),  UINT(writer),
        UINT(commit), UINT(ended),       BYTES(identity), {NULL, 0, 0, 0}
    }},
#undef OF
};

static bool add_field(PyObject *names, PyObject *formats, PyObject *offsets,
                      const struct field_note *field) {
    const char *format = field->kind == 'S' || field->kind == 'V' ? "%c%zu" : "<%c%zu";
    return py_append(names, PyUnicode_FromString(field->name)) &&
           py_append(formats, PyUnicode_FromFormat(format, field->kind, field->bytes)) &&
           py_append(offsets, PyLong_FromSize_t(field->offset));
}

/* layout() -> {struct: {"names", "formats", "offsets", "itemsize"}}: arguments of numpy.dtype. */
static PyObject *py_layout(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
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

/* ---- Sizes of a planned segment, before its creation. */
/* segment_plan(capacity, max_producers, extent_bytes) -> (segment bytes, extent bytes, extents,
 * producers with an extent of their own), or None for an impossible layout. */
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
    return Py_BuildValue("(KKII)", U64(plan.segment_bytes), U64(plan.extent_bytes),
                         plan.extent_count,
                         plan.extent_count - reserved_extents(plan.extent_count));
}

/* ---- next_round, for shmbus.Producer. */
/* next_round(segment): a number never handed out before on this bus. */
SEGMENT_FUNCTION(py_next_round, py_take_writable) {
    return PyLong_FromLongLong(shmbus_next_round(segment->c.header));
}

PyMethodDef py_inspect_functions[] = {
    {"layout", py_layout, METH_NOARGS, NULL},
    {"lock_held", py_lock_held, METH_VARARGS, NULL},
    {"lock_all", py_lock_all, METH_VARARGS, NULL},
    {"scan_run", py_scan_run, METH_VARARGS, NULL},
    {"read_run", py_read_run, METH_VARARGS, NULL},
    {"segment_plan", py_segment_plan, METH_VARARGS, NULL},
    {"next_round", py_next_round, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
