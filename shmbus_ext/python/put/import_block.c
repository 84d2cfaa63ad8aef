/* check_block and import_block: a block's records into a producer's lane.
 *
 * Invariants: the whole block is checked before its first commit, and every record's head again at
 * its write, since another process may own the buffer. Records are committed in order, so the
 * lane's gain identifies the committed records. */
#include "python/put/put.h"

#include "ring/block.h"
#include "ring/lead.h"
#include "ring/requests.h"

static const char *const faults[] = {
    [BLOCK_NOT_ONE] = "it is no block of shmbus: its first bytes are %llx, not %llx",
    [BLOCK_OTHER_VERSION] = "block version %llu, this process needs %llu; run the same shmbus on "
                            "both nodes",
    [BLOCK_OTHER_LAYOUT] = "its records are of layout version %llu, this process needs %llu; run "
                           "the same shmbus on both nodes",
    [BLOCK_CUT] = "it has %llu bytes and should have %llu: it was cut, or something was added",
    [BLOCK_DAMAGED] = "its checksum is %#llx and should be %#llx: bytes of it were changed on the "
                      "way",
    [BLOCK_BAD_LENGTH] = "a length is %llu where %llu is what there may be",
    [BLOCK_BAD_RECORD] = "its numbers contradict each other",
    [BLOCK_BAD_PAYLOAD] = "its payload does not have its producer's checksum",
    [BLOCK_OTHER_SPLIT] = "it is of split number %llu of its own bus, and of none of this one",
    [BLOCK_TWO_FIELDS] = "two of its fields have one name",
};

static void raise_fault(const struct block_report *report) {
    char text[200], which[40] = "";
    PyOS_snprintf(text, sizeof text, faults[report->fault], U64(report->got),
                  U64(report->expected));
    if (report->fault >= BLOCK_BAD_LENGTH) {
        PyOS_snprintf(which, sizeof which, "record %u: ", report->record);
    }
    PyErr_Format(PyExc_ValueError,
                 "block refused: %s%s; nothing of it was taken, export it again", which, text);
}

/* True if a producer could have written the text and dtypes; false with an exception. */
static bool schema_holds(const struct record_copy *copy, PyObject **last) {
    const char *encoded = (const char *)copy->schema;
    if (*last != NULL && PyBytes_GET_SIZE(*last) == (Py_ssize_t)copy->header.schema_bytes &&
        memcmp(PyBytes_AS_STRING(*last), encoded, copy->header.schema_bytes) == 0) {
        return true;
    }
    SchemaObject *schema =
        py_schema_parse(copy->schema, copy->header.schema_bytes, copy->header.field_count);
    bool good = schema != NULL;
    for (int field = 0; good && field < (int)copy->header.field_count; field++) {
        good = py_schema_dtype(schema, field) != NULL;
    }
    if (good) {
        Py_XSETREF(*last, Py_NewRef(schema->encoded));
    }
    Py_XDECREF(schema);
    return good;
}

static bool id_holds(const struct record_copy *copy) {
    PyObject *id = PyUnicode_DecodeUTF8(copy->id, copy->header.id_bytes, NULL);
    Py_XDECREF(id);
    return id != NULL;
}

/* Replace the current exception by a message with the record's number. */
static void name_record(uint32_t record) {
    PyObject *why = py_set_aside_error();
    PyErr_Format(PyExc_ValueError,
                 "block refused: record %u: %S; nothing of it was taken, export it again", record,
                 why);
    Py_XDECREF(why);
}

/* (origins, checks) of every record; NULL with an exception. */
static PyObject *check_records(const struct block_header *header, struct block_cursor *cursor) {
    PyObject *origins =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(cursor->count * RELAY_ORIGIN_BYTES));
    PyObject *checks =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(cursor->count * sizeof(uint32_t)));
    struct record_copy *copy = PyMem_Malloc(sizeof *copy);
    PyObject *last = NULL;
    bool good = origins != NULL && checks != NULL && copy != NULL;
    if (copy == NULL && !PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    while (good) {
        struct block_report report;
        const uint32_t record = cursor->next;
        if (block_next(cursor, copy, &report) == NULL) {
            good = report.fault == BLOCK_OK;
            if (!good) {
                raise_fault(&report);
            }
            break;
        }
        good = id_holds(copy) && schema_holds(copy, &last);
        if (!good) {
            name_record(record);
            break;
        }
        const struct record_header *head = &copy->header;
        origin_pack(PyBytes_AS_STRING(origins) + record * RELAY_ORIGIN_BYTES, header->identity,
                    head->producer_id, head->sequence);
        memcpy(PyBytes_AS_STRING(checks) + record * sizeof head->header_crc, &head->header_crc,
               sizeof head->header_crc);
    }
    Py_XDECREF(last);
    PyMem_Free(copy);
    PyObject *both = good ? PyTuple_Pack(2, origins, checks) : NULL;
    Py_XDECREF(origins);
    Py_XDECREF(checks);
    return both;
}

/* check_block(buffer, splits=b"\0") -> (origins, checks): the records' origins, packed, and the
 * checks of their heads, a u32 per record. `splits`: a byte per split of the source bus, with its
 * number here. ValueError for a faulty block. */
static PyObject *py_check_block(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer block, splits = {.buf = "", .len = 1};
    if (!PyArg_ParseTuple(args, "y*|y*", &block, &splits)) {
        return NULL;
    }
    struct block_header header;
    struct block_cursor cursor;
    struct block_report report;
    bool whole;
    Py_BEGIN_ALLOW_THREADS
    whole = block_open(block.buf, (uint64_t)block.len, &header, &cursor, &report);
    Py_END_ALLOW_THREADS
    PyObject *found = NULL;
    if (whole) {
        cursor.splits = splits.buf;
        cursor.split_count = (uint32_t)splits.len;
        found = check_records(&header, &cursor);
    } else {
        raise_fault(&report);
    }
    PyBuffer_Release(&block);
    PyBuffer_Release(&splits);
    return found;
}

/* Claim room for a record: 1 on success, 0 if full and `waits` is false, -1 with an exception. */
static int claim(WriterObject *self, const struct record_copy *copy, bool waits, double timeout_s,
                 struct reservation *at) {
    const struct record_header *head = &copy->header;
    struct wanted_room wanted = {.bytes = head->record_bytes};
    if (lead_is_bounded(&self->segment->c) && (head->flags & SHMBUS_FLAG_FAILED) == 0) {
        wanted.begins = lead_key(copy->id, head->id_bytes, head->round, head->split);
    }
    if (waits) {
        return py_writer_claim_room(self, &wanted, timeout_s, at) ? 1 : -1;
    }
    return py_writer_try_claim(self, &wanted, at) == WRITER_OK;
}

/* Commit records in order; return their number, or -1 with an exception and no commit. `entries`:
 * relay journal entry per record, or NULL. */
static Py_ssize_t import_records(WriterObject *self, struct block_cursor *cursor, Py_ssize_t limit,
                                 double timeout_s, const uint8_t *entries) {
    struct record_copy *copy = PyMem_Malloc(sizeof *copy);
    if (copy == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t done = 0;
    uint64_t group = 0, request = 0;
    uint32_t row = 0;
    while (done >= 0 && done < limit) {
        struct block_report report;
        const uint8_t *image = block_next(cursor, copy, &report);
        if (image == NULL) {
            if (report.fault != BLOCK_OK && done == 0) {
                raise_fault(&report);
                done = -1;
            }
            break;
        }
        struct reservation at;
        int room = claim(self, copy, done == 0, timeout_s, &at);
        if (room <= 0) {
            done = room < 0 ? -1 : done;
            break;
        }
        uint32_t entry = 0;
        if (entries != NULL) {
            memcpy(&entry, entries + (size_t)done * sizeof entry, sizeof entry);
            entry++;
        }
        block_write(at.record, &at.place, copy, image, self->c.producer_id, self->c.slot_index,
                    entry << SHMBUS_FLAG_RELAY_SHIFT);
        writer_publish(&self->c, &at);
        if (requests_are_used(&self->segment->c)) {
            const struct record_header *head = &copy->header;
            uint64_t key = lead_key(copy->id, head->id_bytes, head->round, head->split);
            if (key != group) { /* a group's samples are adjacent */
                group = key;
                request = request_find(&self->segment->c, copy->id, head->id_bytes, head->round,
                                       head->split, &row);
            }
            request_arrived(&self->segment->c, row, request, head->index);
        }
        self->bytes += at.bytes;
        done++;
    }
    PyMem_Free(copy);
    return done;
}

/* import_block(writer, buffer, first, limit, timeout_s, entries=b"", splits=b"\0") -> int: number
 * of records committed, from record `first` of the block on, at most `limit`. Only the first record
 * waits for space. The block must have passed check_block with the same `splits`. `entries`: from
 * relay_intend, to report the records' ends. */
static PyObject *py_import_block(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *object, *timeout;
    Py_buffer block, entries = {0}, splits = {.buf = "", .len = 1};
    Py_ssize_t first, limit;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "O!y*nnO|y*y*", &WriterType, &object, &block, &first, &limit,
                          &timeout, &entries, &splits)) {
        return NULL;
    }
    const bool noted = entries.len > 0;
    if (noted && entries.len / (Py_ssize_t)sizeof(uint32_t) < limit) {
        limit = entries.len / (Py_ssize_t)sizeof(uint32_t);
    }
    WriterObject *self = (WriterObject *)object;
    struct block_cursor cursor;
    Py_ssize_t done = -1;
    if (py_parse_timeout(timeout, &timeout_s) && py_writer_usable(self)) {
        bool good = block_reopen(block.buf, (uint64_t)block.len, &cursor);
        for (Py_ssize_t i = 0; good && i < first; i++) {
            good = block_skip(&cursor);
        }
        if (!good) {
            PyErr_SetString(PyExc_ValueError,
                            "import_block: expected a block that was checked, and a record of it");
        } else {
            cursor.splits = splits.buf;
            cursor.split_count = (uint32_t)splits.len;
            done = import_records(self, &cursor, limit, timeout_s, noted ? entries.buf : NULL);
        }
    }
    PyBuffer_Release(&block);
    PyBuffer_Release(&entries);
    PyBuffer_Release(&splits);
    if (done > 0) {
        py_writer_tell_reader(self);
    }
    return done < 0 ? NULL : PyLong_FromSsize_t(done);
}

PyMethodDef py_import_functions[] = {
    {"check_block", py_check_block, METH_VARARGS, NULL},
    {"import_block", py_import_block, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
