/* Restorer: writes a snapshot's contents into a new segment, before the segment becomes known.
 *
 * Invariants: the segment must be fresh, and this object acts as the collector. Records go into the
 * collector's own lane as if moved there, so every record keeps its producer's number. The counters
 * come last and restore the ledger. Records follow in sequence or, if their runs are named, a run's
 * records fill a run of the same length and take no additional extents. */
#include "python/put/put.h"

#include "base/file_lock.h"
#include "ring/lead.h"

/* Saved position of the lane in a run left earlier. */
struct open_run {
    uint64_t used;
    uint64_t bytes;
    uint32_t extent; /* may be NO_EXTENT */
    uint32_t generation;
};

typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    struct writer lane;
    struct open_run *runs; /* by the run's first extent in the snapshot; NULL at first */
    bool attached;
} RestorerObject;

static bool is_fresh(const struct segment *segment) {
    for (uint32_t i = 0; i <= segment->max_producers; i++) {
        if (ACQUIRE(segment->slots[i].producer_id) != 0 ||
            ACQUIRE(segment->slots[i].committed) != 0) {
            return false;
        }
    }
    return extent_count_free(segment) == segment->extent_count - segment_reserved(segment);
}

static int py_restorer_init(RestorerObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", NULL};
    PyObject *segment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &SegmentType, &segment)) {
        return -1;
    }
    NEVER(self->segment != NULL, -1);
    self->segment = (SegmentObject *)Py_NewRef(segment);
    struct segment *c = &self->segment->c;
    if (!py_segment_usable(self->segment, "handle")) {
        return -1;
    }
    if (file_lock_take(c->fd, SHMBUS_LOCK_COLLECTOR) != LOCK_TAKEN) {
        py_raise_hook(hooks.busy_error, Py_BuildValue("(Os)", segment, "collector"));
        return -1;
    }
    if (!is_fresh(c)) {
        file_lock_drop(c->fd, SHMBUS_LOCK_COLLECTOR);
        PyErr_Format(PyExc_ValueError, "bus '%U': expected one that nobody has used yet",
                     self->segment->name);
        return -1;
    }
    writer_attach_collector(&self->lane, c);
    self->attached = true;
    return 0;
}

static bool py_restorer_usable(RestorerObject *self) {
    if (!self->attached) {
        return py_refuse(hooks.closed_error, "this restorer is closed; make a new one");
    }
    return py_segment_usable(self->segment, "restorer");
}

/* Sizes come from the snapshot; offsets within the record are planned here. */
static bool read_shape(struct put_arguments *a, const Py_buffer *schema, const Py_buffer *shape,
                       PyObject *fields) {
    const uint8_t *at = schema->buf;
    const uint8_t *end = at + schema->len;
    Py_ssize_t words = shape->len / 8;
    Py_ssize_t word = 0;
    uint32_t count = 0;
    if (words > SHMBUS_MAX_SHAPE_WORDS || shape->len % 8 != 0 ||
        schema->len > SHMBUS_MAX_SCHEMA_BYTES) {
        return false;
    }
    memcpy(a->shape, shape->buf, (size_t)shape->len);
    for (; at < end; count++) {
        struct schema_entry entry;
        if (count >= SHMBUS_MAX_FIELDS || (size_t)(end - at) < sizeof entry) {
            return false;
        }
        memcpy(&entry, at, sizeof entry);
        at += sizeof entry;
        if (end - at < entry.name_bytes + entry.dtype_bytes || entry.ndim > SHMBUS_MAX_NDIM ||
            word + 1 + entry.ndim > words || (Py_ssize_t)count >= PyList_GET_SIZE(fields)) {
            return false;
        }
        at += entry.name_bytes + entry.dtype_bytes;
        uint64_t bytes = entry.itemsize;
        for (uint32_t d = 1; d <= entry.ndim; d++) {
            uint64_t size = a->shape[word + d];
            if (size != 0 && bytes > (UINT64_C(1) << 48) / size) {
                return false;
            }
            bytes *= size;
        }
        a->field_bytes[count] = bytes;
        a->field_ndim[count] = entry.ndim;
        word += 1 + entry.ndim;
    }
    a->spec.field_count = count;
    a->spec.shape_words = (uint32_t)words;
    return word == words && (Py_ssize_t)count == PyList_GET_SIZE(fields);
}

static bool copy_fields(const struct put_arguments *a, struct record_header *record,
                        PyObject *fields) {
    const uint64_t *shape = a->shape;
    for (uint32_t i = 0; i < a->spec.field_count; i++) {
        Py_buffer data;
        if (PyObject_GetBuffer(PyList_GET_ITEM(fields, i), &data, PyBUF_SIMPLE) < 0) {
            return false;
        }
        bool fits = (uint64_t)data.len == a->field_bytes[i];
        if (fits) {
            memcpy((uint8_t *)record + shape[0], data.buf, (size_t)data.len);
        }
        PyBuffer_Release(&data);
        if (!fits) {
            return py_refuse(PyExc_ValueError, "field %u: expected %llu bytes", i,
                             U64(a->field_bytes[i]));
        }
        shape += 1 + a->field_ndim[i];
    }
    return true;
}

/* Continue the lane in the run `from`, beginning it with `span` extents if new. */
static enum writer_status enter_run(RestorerObject *self, uint32_t from, uint64_t span) {
    struct segment *segment = &self->segment->c;
    struct writer *lane = &self->lane;
    if (self->runs == NULL) {
        self->runs = PyMem_Calloc(segment->extent_count, sizeof *self->runs);
        if (self->runs == NULL) {
            PyErr_NoMemory();
            return WRITER_SYSTEM_ERROR;
        }
        for (uint32_t i = 0; i < segment->extent_count; i++) {
            self->runs[i].extent = NO_EXTENT;
        }
    }
    const struct open_run *run = &self->runs[from];
    lane->extent = run->extent;
    lane->generation = run->generation;
    lane->used = run->used;
    lane->run_bytes = run->bytes;
    if (run->extent != NO_EXTENT) {
        return WRITER_OK;
    }
    struct reservation whole;
    enum writer_status status = writer_claim(lane, span * segment->extent_bytes, &whole);
    if (status == WRITER_FULL && lane->spare != NO_EXTENT) {
        /* Every extent was in use, so the snapshot's lane held no spare. */
        extent_unlease(segment, lane->spare,
                       link_make(lane->spare_generation, lane->slot_index + 1));
        lane->spare = NO_EXTENT;
        status = writer_claim(lane, span * segment->extent_bytes, &whole);
    }
    return status;
}

static void leave_run(RestorerObject *self, uint32_t from) {
    self->runs[from] = (struct open_run){.used = self->lane.used,
                                         .bytes = self->lane.run_bytes,
                                         .extent = self->lane.extent,
                                         .generation = self->lane.generation};
    self->lane.extent = NO_EXTENT;
}

static void seal_runs(RestorerObject *self) {
    for (uint32_t i = 0; self->runs != NULL && i < self->segment->c.extent_count; i++) {
        if (self->runs[i].extent != NO_EXTENT) {
            self->lane.extent = self->runs[i].extent;
            writer_seal(&self->lane);
        }
    }
    writer_seal(&self->lane);
    writer_keep_spare(&self->lane);
}

static enum writer_status write_record(RestorerObject *self, struct put_arguments *a,
                                       unsigned long long producer_id, unsigned long long sequence,
                                       const Py_buffer *meta, PyObject *fields) {
    struct reservation to;
    enum writer_status status = writer_claim(&self->lane, a->spec.record_bytes, &to);
    if (status != WRITER_OK) {
        return status;
    }
    record_write_frame(to.record, &to.place, a->spec.record_bytes, producer_id,
                       self->lane.slot_index, a->spec.flags);
    record_write_body(to.record, &a->spec);
    if (meta->len > 0) {
        memcpy((uint8_t *)to.record + a->spec.meta_offset, meta->buf, (size_t)meta->len);
    }
    if (!copy_fields(a, to.record, fields)) {
        return WRITER_SYSTEM_ERROR; /* not exposed: the next record overwrites the place */
    }
    record_close(to.record, to.bytes, sequence, 0);
    writer_publish_moved(&self->lane, &to, SHMBUS_COMMITTED);
    return WRITER_OK;
}

/* Write into the record's former run, `span << 32 | its first extent + 1`; with 0, behind the last
 * record. */
static enum writer_status place_record(RestorerObject *self, struct put_arguments *a,
                                       unsigned long long producer_id, unsigned long long sequence,
                                       const Py_buffer *meta, PyObject *fields,
                                       unsigned long long run) {
    if (run == 0) {
        return write_record(self, a, producer_id, sequence, meta, fields);
    }
    const struct segment *segment = &self->segment->c;
    uint64_t from = (uint32_t)run, span = run >> 32;
    if (from < 1 || from > segment->extent_count || span < 1 || span > segment->max_span) {
        PyErr_SetString(PyExc_ValueError, "the run of this record is none");
        return WRITER_SYSTEM_ERROR;
    }
    enum writer_status status = enter_run(self, (uint32_t)from - 1, span);
    if (status != WRITER_OK) {
        return status;
    }
    if (a->spec.record_bytes > self->lane.run_bytes - self->lane.used) {
        PyErr_SetString(PyExc_ValueError, "the run of this record is too short for it");
        status = WRITER_SYSTEM_ERROR;
    } else {
        status = write_record(self, a, producer_id, sequence, meta, fields);
    }
    leave_run(self, (uint32_t)from - 1);
    return status;
}

/* Count the record's group towards the lead: its missing samples wait for no delivery. */
static void admit(const RestorerObject *self, const struct record_spec *spec) {
    struct segment *segment = &self->segment->c;
    if (lead_is_bounded(segment) && (spec->flags & SHMBUS_FLAG_FAILED) == 0) {
        uint64_t key = lead_key(spec->id, spec->id_bytes, spec->round, spec->split);
        lead_admit(segment, key, self->lane.slot_index, 0);
        lead_settle(segment, key, self->lane.slot_index);
    }
}

/* put(producer_id, sequence, policy_version, version_span, score, group_size, need, index, split,
 *     round, flags, id, schema, shape, meta, fields, run) -> bool: False if the bus is full. Name
 *     a run for every record or for no record. */
static PyObject *py_restorer_put(RestorerObject *self, PyObject *args) {
    unsigned long long producer_id, sequence, run;
    long long policy_version, round;
    Py_buffer id, schema, shape, meta;
    PyObject *fields;
    unsigned int flags;
    struct put_fields parts;
    struct put_arguments arguments, *a = &arguments;
    py_arguments_begin(a, &parts);
    if (!py_restorer_usable(self) ||
        !PyArg_ParseTuple(args, "KKLIdIIIILIy*y*y*y*O!K", &producer_id, &sequence,
                          &policy_version, &a->spec.version_span, &a->spec.score,
                          &a->spec.group_size, &a->spec.need, &a->spec.index, &a->spec.split,
                          &round, &flags, &id, &schema, &shape, &meta, &PyList_Type, &fields, &run)) {
        return NULL;
    }
    a->spec.policy_version = policy_version;
    a->spec.round = round;
    a->spec.flags = SHMBUS_FLAG_MOVED | flags;
    a->spec.id = id.buf;
    a->spec.id_bytes = (uint32_t)id.len;
    a->spec.schema = schema.buf;
    a->spec.schema_bytes = (uint32_t)schema.len;
    a->spec.shape = a->shape;
    a->spec.field_bytes = a->field_bytes;
    a->spec.field_ndim = a->field_ndim;
    a->spec.meta_bytes = (uint64_t)meta.len;
    PyObject *result = NULL;
    if (!record_flags_hold(a->spec.flags) || id.len < 1 || id.len > SHMBUS_MAX_ID_BYTES ||
        a->spec.group_size < 1 || a->spec.group_size > SHMBUS_MAX_GROUP_SIZE ||
        a->spec.need > a->spec.group_size || a->spec.index >= a->spec.group_size ||
        a->spec.split >= SHMBUS_MAX_SPLITS || producer_id == 0 ||
        policy_version > INT64_MAX - (int64_t)a->spec.version_span ||
        (flags & ~SHMBUS_FLAGS_KEPT) != 0 || !read_shape(a, &schema, &shape, fields) ||
        !record_plan(&a->spec)) {
        PyErr_SetString(PyExc_ValueError, "the parts of this record do not make one");
    } else {
        switch (place_record(self, a, producer_id, sequence, &meta, fields, run)) {
        case WRITER_OK:
            admit(self, &a->spec);
            result = Py_NewRef(Py_True);
            break;
        case WRITER_FULL:
        case WRITER_TOO_LARGE:
            result = Py_NewRef(Py_False);
            break;
        default:
            break; /* an exception tells the reason */
        }
    }
    PyBuffer_Release(&id);
    PyBuffer_Release(&schema);
    PyBuffer_Release(&shape);
    PyBuffer_Release(&meta);
    return result;
}

static bool restore_slot(struct segment *segment, PyObject *row) {
    unsigned int slot, pid;
    unsigned long long producer_id, committed, aborted;
    const char *label;
    if (!PyArg_ParseTuple(row, "IKIsKK", &slot, &producer_id, &pid, &label, &committed,
                          &aborted)) {
        return false;
    }
    NEVER(slot >= segment->max_producers, false);
    struct producer_slot *to = &segment->slots[slot];
    size_t length = strlen(label);
    memcpy(to->label, label, length < SHMBUS_LABEL_BYTES ? length : SHMBUS_LABEL_BYTES - 1);
    SET_RELAXED(to->pid, pid);
    SET_RELAXED(to->aborted, aborted);
    SET_RELEASE(to->committed, committed);
    SET_RELEASE(to->producer_id, producer_id);
    return true;
}

/* finish(released, slots, next_producer_id, policy_version, next_round): restore the counters and
 * end. */
static PyObject *py_restorer_finish(RestorerObject *self, PyObject *args) {
    PyObject *released, *slots;
    unsigned long long next_producer_id, next_round;
    long long policy_version;
    if (!py_restorer_usable(self) ||
        !PyArg_ParseTuple(args, "O!O!KLK", &PyTuple_Type, &released, &PyList_Type, &slots,
                          &next_producer_id, &policy_version, &next_round)) {
        return NULL;
    }
    struct segment *segment = &self->segment->c;
    NEVER(PyTuple_GET_SIZE(released) != SHMBUS_REASONS, NULL);
    for (int i = 0; i < SHMBUS_REASONS; i++) {
        unsigned long long count = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(released, i));
        if (count == (unsigned long long)-1 && PyErr_Occurred()) {
            return NULL;
        }
        SET_RELAXED(segment->header->released[i], count);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots); i++) {
        if (!restore_slot(segment, PyList_GET_ITEM(slots, i))) {
            return NULL;
        }
    }
    seal_runs(self);
    SET_RELAXED(segment->header->policy_version, policy_version);
    rounds_resume(segment->header, next_round);
    uint64_t own = RELAXED(segment->header->next_producer_id);
    SET_RELEASE(segment->header->next_producer_id, next_producer_id > own ? next_producer_id : own);
    self->attached = false;
    file_lock_drop(segment->fd, SHMBUS_LOCK_COLLECTOR);
    Py_RETURN_NONE;
}

/* ancestors(rows): (identity, producers) of the records' buses, oldest first; beyond capacity only
 * the newest. */
static PyObject *py_restorer_ancestors(RestorerObject *self, PyObject *rows) {
    if (!py_restorer_usable(self)) {
        return NULL;
    }
    const Py_ssize_t count = PyList_Check(rows) ? PyList_GET_SIZE(rows) : -1;
    NEVER(count < 0, NULL);
    const Py_ssize_t skipped = Py_MAX(count - (Py_ssize_t)SHMBUS_ANCESTORS, 0);
    for (Py_ssize_t i = skipped; i < count; i++) {
        const char *identity;
        Py_ssize_t size;
        unsigned long long producers;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(rows, i), "y#K", &identity, &size, &producers)) {
            return NULL;
        }
        NEVER(size != SHMBUS_IDENTITY_BYTES, NULL);
        struct bus_ancestor *to = &self->segment->c.header->ancestors[i - skipped];
        memcpy(to->identity, identity, SHMBUS_IDENTITY_BYTES);
        to->producers = producers;
    }
    Py_RETURN_NONE;
}

/* split(number, acknowledged, dropped): restore the split's counters. */
static PyObject *py_restorer_split(RestorerObject *self, PyObject *args) {
    unsigned int number;
    unsigned long long acked, dropped;
    if (!py_restorer_usable(self) ||
        !PyArg_ParseTuple(args, "IKK", &number, &acked, &dropped)) {
        return NULL;
    }
    NEVER(number >= SHMBUS_MAX_SPLITS, NULL);
    struct split_entry *entry = &self->segment->c.splits[number];
    SET_RELAXED(entry->acked, acked);
    SET_RELAXED(entry->dropped, dropped);
    Py_RETURN_NONE;
}

static void py_restorer_dealloc(RestorerObject *self) {
    if (self->attached && self->segment->generation == fork_generation &&
        self->segment->c.fd >= 0) {
        file_lock_drop(self->segment->c.fd, SHMBUS_LOCK_COLLECTOR);
    }
    PyMem_Free(self->runs);
    Py_XDECREF(self->segment);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef restorer_methods[] = {
    METHOD("put", py_restorer_put, METH_VARARGS, NULL),
    METHOD("ancestors", py_restorer_ancestors, METH_O, NULL),
    METHOD("split", py_restorer_split, METH_VARARGS, NULL),
    METHOD("finish", py_restorer_finish, METH_VARARGS, NULL),
    {NULL, NULL, 0, NULL},
};

PyTypeObject RestorerType = {
    TYPE_BASICS("Restorer", RestorerObject, py_restorer_dealloc, 0),
    .tp_methods = restorer_methods,
    .tp_init = (initproc)py_restorer_init,
    .tp_new = PyType_GenericNew,
};
