/* Writer: what shmbus.Producer is made of. Slot: a reservation as Python fills it.
 *
 * Invariant: the interpreter lock serialises all calls on a lane; it is let go only while waiting
 * for space and while bytes are copied into a record that is already reserved. */
#include "pyapi.h"

#include "doorbell.h"

/* Copies above this are worth letting other threads run. */
#define RELEASE_LOCK_BYTES (UINT64_C(256) << 10)
/* A waiting producer looks this often for signals and for a bus that is closed under it. */
#define WAIT_SLICE_NS INT64_C(100000000)

typedef struct slot_object SlotObject;

typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    struct writer c;
    struct schema_cache schemas;
    SlotObject *open; /* reservations that are not ended */
    uint64_t bytes;
    uint64_t full_waits;
    uint32_t flags;
    bool attached;
} WriterObject;

struct slot_object {
    PyObject_HEAD
    WriterObject *writer;
    KeeperObject *keeper;
    struct reservation at;
    PyObject *names; /* tuple */
    PyArrayObject *arrays[SHMBUS_MAX_FIELDS];
    uint16_t shape_at[SHMBUS_MAX_FIELDS];
    uint32_t count;
    uint32_t meta_room;
    double score;
    bool ended;
    SlotObject *previous, *next;
};

static bool writer_usable(WriterObject *self) {
    if (!self->attached) {
        PyErr_SetString(hooks.closed_error, "this Producer is not attached to a bus");
        return false;
    }
    return segment_usable(self->segment, "Producer");
}

static int writer_init(WriterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", "label", "checksum", NULL};
    PyObject *segment;
    const char *label;
    int checksum = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!s|p", names, &SegmentType, &segment, &label,
                                     &checksum)) {
        return -1;
    }
    if (self->segment != NULL) {
        PyErr_SetString(PyExc_TypeError, "this Producer is initialised already");
        return -1;
    }
    self->segment = (SegmentObject *)Py_NewRef(segment);
    if (!segment_usable(self->segment, "handle")) {
        return -1;
    }
    enum writer_status status = writer_attach(&self->c, &self->segment->c, label);
    if (status == WRITER_SYSTEM_ERROR) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->segment->name);
        return -1;
    }
    if (status != WRITER_OK) {
        raise_hook(hooks.busy_error, Py_BuildValue("(Os)", segment, "producer"));
        return -1;
    }
    self->flags = checksum ? SHMBUS_FLAG_PAYLOAD_CRC : 0;
    self->attached = true;
    return 0;
}

/* One attempt, and where the bus is full, waiting as long as timeout_s allows. */
static bool claim(WriterObject *self, uint64_t bytes, double timeout_s, struct reservation *at) {
    enum writer_status status = writer_claim(&self->c, bytes, at);
    if (status == WRITER_OK) {
        return true;
    }
    struct segment *segment = &self->segment->c;
    if (status == WRITER_TOO_LARGE) {
        PyErr_Format(hooks.too_large_error,
                     "bus '%U': a record takes at most %llu bytes, this one needs %llu; create the "
                     "bus with a larger capacity (a record may take a quarter of it) or split the "
                     "trajectory",
                     self->segment->name, (unsigned long long)segment->record_limit,
                     (unsigned long long)bytes);
        return false;
    }
    uint64_t start = clock_monotonic_ns();
    self->full_waits++;
    for (;;) {
        /* What is sealed can be freed, and a sleeping reader gets the chance to. */
        writer_seal(&self->c);
        uint32_t ticket = doorbell_want_space(segment->header);
        doorbell_ring(segment->header);
        if (writer_claim(&self->c, bytes, at) == WRITER_OK) {
            return true;
        }
        double waited_s = (double)(clock_monotonic_ns() - start) / 1e9;
        if (timeout_s >= 0 && waited_s >= timeout_s) {
            raise_hook(hooks.full_error,
                       Py_BuildValue("(OKd)", self->segment, (unsigned long long)bytes, waited_s));
            return false;
        }
        int64_t slice_ns = WAIT_SLICE_NS;
        if (timeout_s >= 0 && (timeout_s - waited_s) * 1e9 < (double)slice_ns) {
            slice_ns = (int64_t)((timeout_s - waited_s) * 1e9) + 1;
        }
        Py_BEGIN_ALLOW_THREADS
        doorbell_await_space(segment->header, ticket, slice_ns);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0 || !writer_usable(self)) {
            return false;
        }
    }
}

static void copy_payload(const struct put_arguments *arguments, uint8_t *record) {
    const struct record_spec *spec = &arguments->spec;
    if (spec->meta_bytes > 0) {
        memcpy(record + spec->meta_offset, PyBytes_AS_STRING(arguments->meta_encoded),
               spec->meta_bytes);
    }
    const uint64_t *shape = spec->shape;
    for (uint32_t i = 0; i < arguments->array_count; i++) {
        memcpy(record + shape[0], PyArray_DATA(arguments->arrays[i]), arguments->field_bytes[i]);
        shape += 1 + arguments->field_ndim[i];
    }
}

static void write_head(WriterObject *self, const struct put_arguments *arguments,
                       const struct reservation *at) {
    record_write_frame(at->record, &at->place, at->bytes, self->c.producer_id, self->c.slot_index,
                       self->flags);
    record_write_body(at->record, &arguments->spec);
}

/* Arguments are finished. Copies the trajectory into the ring and commits it. */
static bool put_one(WriterObject *self, struct put_arguments *arguments, double timeout_s) {
    struct reservation at;
    if (!claim(self, arguments->spec.record_bytes, timeout_s, &at)) {
        return false;
    }
    write_head(self, arguments, &at);
    if (arguments->spec.record_bytes < RELEASE_LOCK_BYTES) {
        copy_payload(arguments, (uint8_t *)at.record);
        writer_publish(&self->c, &at);
    } else {
        /* Reserved first, so that another thread's record can go behind it meanwhile. */
        writer_reserve(&self->c, &at);
        Py_BEGIN_ALLOW_THREADS
        copy_payload(arguments, (uint8_t *)at.record);
        Py_END_ALLOW_THREADS
        writer_commit(&self->c, &at);
    }
    self->bytes += at.bytes;
    return true;
}

static bool take_call(struct put_arguments *arguments, PyObject *const *args, Py_ssize_t count,
                      PyObject *kwnames) {
    if (count > 1) {
        PyErr_Format(PyExc_TypeError,
                     "expected one positional argument, instance_id, got %zd; give the others by "
                     "name",
                     count);
        return false;
    }
    if (count == 1 && !arguments_take_id(arguments, args[0])) {
        return false;
    }
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < named; i++) {
        if (!arguments_take(arguments, PyTuple_GET_ITEM(kwnames, i), args[count + i])) {
            return false;
        }
    }
    return true;
}

static PyObject *writer_put(WriterObject *self, PyObject *const *args, Py_ssize_t count,
                            PyObject *kwnames) {
    if (!writer_usable(self)) {
        return NULL;
    }
    struct put_arguments arguments;
    arguments_begin(&arguments);
    bool done = take_call(&arguments, args, count, kwnames) &&
                arguments_finish(&arguments, &self->schemas) &&
                put_one(self, &arguments, arguments.timeout_s);
    arguments_end(&arguments);
    if (!done) {
        return NULL;
    }
    doorbell_ring(self->segment->c.header);
    Py_RETURN_NONE;
}

static bool take_mapping(struct put_arguments *arguments, PyObject *item, Py_ssize_t at) {
    if (!PyDict_Check(item)) {
        PyErr_Format(PyExc_TypeError,
                     "put_many: item %zd: expected a dict of put's arguments, got %.100s", at,
                     Py_TYPE(item)->tp_name);
        return false;
    }
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(item, &position, &key, &value)) {
        if (!PyUnicode_Check(key)) {
            PyErr_Format(PyExc_TypeError, "put_many: item %zd: expected str keys, got %.100s", at,
                         Py_TYPE(key)->tp_name);
            return false;
        }
        if (!arguments_take(arguments, key, value)) {
            return false;
        }
    }
    return true;
}

/* One pass that only checks, so that a bad item leaves the bus as it was. */
static bool check_items(WriterObject *self, PyObject *items) {
    struct put_arguments arguments;
    Py_ssize_t count = PyList_GET_SIZE(items);
    for (Py_ssize_t i = 0; i < count && i < PyList_GET_SIZE(items); i++) {
        arguments_begin(&arguments);
        bool good = take_mapping(&arguments, PyList_GET_ITEM(items, i), i) &&
                    arguments_finish(&arguments, &self->schemas);
        if (good && arguments.spec.record_bytes > self->segment->c.record_limit) {
            struct reservation unused;
            good = claim(self, arguments.spec.record_bytes, 0.0, &unused);
        }
        arguments_end(&arguments);
        if (!good) {
            return false;
        }
    }
    return true;
}

/* Says on the exception that is set how many items were put before it. */
static void note_accepted(Py_ssize_t done) {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *error = PyErr_GetRaisedException();
#else
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
#endif
    PyObject *accepted = PyLong_FromSsize_t(done);
    if (accepted == NULL || PyObject_SetAttrString(error, "accepted", accepted) < 0) {
        PyErr_Clear();
    }
    Py_XDECREF(accepted);
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(type, error, traceback);
#endif
}

/* put_many(items: list[dict], timeout=None) -> records put. A full bus raises with .accepted set. */
static PyObject *writer_put_many(WriterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"items", "timeout", NULL};
    PyObject *sequence, *timeout = Py_None;
    double timeout_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O", names, &sequence, &timeout) ||
        !parse_timeout(timeout, &timeout_s) || !writer_usable(self)) {
        return NULL;
    }
    PyObject *items = PySequence_List(sequence);
    if (items == NULL || !check_items(self, items)) {
        Py_XDECREF(items);
        return NULL;
    }
    uint64_t start = clock_monotonic_ns();
    Py_ssize_t done = 0;
    Py_ssize_t count = PyList_GET_SIZE(items);
    struct put_arguments arguments;
    for (; done < count; done++) {
        arguments_begin(&arguments);
        double left_s = timeout_s;
        if (timeout_s > 0) {
            left_s -= (double)(clock_monotonic_ns() - start) / 1e9;
            left_s = left_s < 0 ? 0 : left_s;
        }
        bool put = take_mapping(&arguments, PyList_GET_ITEM(items, done), done) &&
                   arguments_finish(&arguments, &self->schemas) &&
                   put_one(self, &arguments, left_s);
        arguments_end(&arguments);
        if (!put) {
            break;
        }
    }
    Py_DECREF(items);
    if (done > 0) {
        doorbell_ring(self->segment->c.header);
    }
    if (done < count) {
        note_accepted(done);
        return NULL;
    }
    return PyLong_FromSsize_t(done);
}

/* Sleeps until the reader has freed space or timeout_s is over; never takes any. */
static PyObject *writer_await_space(WriterObject *self, PyObject *argument) {
    double timeout_s;
    if (!parse_timeout(argument, &timeout_s) || !writer_usable(self)) {
        return NULL;
    }
    struct bus_header *header = self->segment->c.header;
    writer_seal(&self->c);
    uint32_t ticket = doorbell_want_space(header);
    doorbell_ring(header);
    if (extent_count_free(&self->segment->c) > 0) {
        Py_RETURN_NONE;
    }
    int64_t slice_ns = timeout_s < 0 || timeout_s * 1e9 > (double)WAIT_SLICE_NS
                           ? WAIT_SLICE_NS
                           : (int64_t)(timeout_s * 1e9);
    SegmentObject *segment = (SegmentObject *)Py_NewRef((PyObject *)self->segment);
    Py_BEGIN_ALLOW_THREADS
    doorbell_await_space(header, ticket, slice_ns);
    Py_END_ALLOW_THREADS
    Py_DECREF(segment);
    Py_RETURN_NONE;
}

/* ---- Reservations ---- */

static void slot_unlink(SlotObject *self) {
    if (self->previous != NULL) {
        self->previous->next = self->next;
    } else if (self->writer->open == self) {
        self->writer->open = self->next;
    }
    if (self->next != NULL) {
        self->next->previous = self->previous;
    }
    self->previous = self->next = NULL;
}

/* Takes the arrays back. One that somebody still holds can no longer be written through, and its
 * record's space is kept until it is gone, for views of it that we don't know of. */
static void slot_take_arrays(SlotObject *self) {
    for (uint32_t i = 0; i < self->count; i++) {
        if (self->arrays[i] != NULL) {
            PyArray_CLEARFLAGS(self->arrays[i], NPY_ARRAY_WRITEABLE);
            Py_CLEAR(self->arrays[i]);
        }
    }
    if (Py_REFCNT((PyObject *)self->keeper) > 1) {
        self->keeper->pinned = true;
        writer_pin(&self->writer->c, &self->at);
    }
}

static void slot_finish(SlotObject *self, bool commit) {
    slot_take_arrays(self);
    self->ended = true;
    slot_unlink(self);
    if (commit) {
        self->at.record->score = self->score;
        writer_commit(&self->writer->c, &self->at);
        self->writer->bytes += self->at.bytes;
    } else {
        writer_abort(&self->writer->c, &self->at);
    }
    doorbell_ring(self->writer->segment->c.header);
}

static bool slot_usable(SlotObject *self) {
    if (self->ended) {
        PyErr_SetString(hooks.closed_error,
                        "this reservation has been committed or aborted; reserve a new one");
        return false;
    }
    return writer_usable(self->writer);
}

/* reserve(head: dict of put's arguments but arrays, names: tuple[str], dtypes: tuple[dtype],
 * shapes: tuple[tuple[int]], meta_room: int) -> Slot */
static PyObject *writer_reserve_slot(WriterObject *self, PyObject *args) {
    PyObject *head, *names, *dtypes, *shapes;
    unsigned int meta_room;
    if (!PyArg_ParseTuple(args, "O!O!O!O!I", &PyDict_Type, &head, &PyTuple_Type, &names,
                          &PyTuple_Type, &dtypes, &PyTuple_Type, &shapes, &meta_room) ||
        !writer_usable(self)) {
        return NULL;
    }
    struct put_arguments arguments;
    PyArray_Descr *descriptions[SHMBUS_MAX_FIELDS];
    PyObject *fields[SHMBUS_MAX_FIELDS];
    struct record_spec *spec = &arguments.spec;
    SlotObject *slot = NULL;
    arguments_begin(&arguments);
    Py_ssize_t count = PyTuple_GET_SIZE(names);
    if (!take_mapping(&arguments, head, 0) || !arguments_finish_head(&arguments)) {
        goto done;
    }
    if (count > (Py_ssize_t)SHMBUS_MAX_FIELDS || PyTuple_GET_SIZE(dtypes) != count ||
        PyTuple_GET_SIZE(shapes) != count) {
        PyErr_Format(PyExc_ValueError, "fields: expected at most %u, got %zd", SHMBUS_MAX_FIELDS,
                     count);
        goto done;
    }
    uint32_t words = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *shape = PyTuple_GET_ITEM(shapes, i);
        Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
        fields[i] = PyTuple_GET_ITEM(names, i);
        descriptions[i] = (PyArray_Descr *)PyTuple_GET_ITEM(dtypes, i);
        if (ndim > (Py_ssize_t)SHMBUS_MAX_NDIM || words + 1 + ndim > SHMBUS_MAX_SHAPE_WORDS) {
            PyErr_Format(PyExc_ValueError, "%U: expected at most %u dimensions, got %zd",
                         fields[i], SHMBUS_MAX_NDIM, ndim);
            goto done;
        }
        double bytes = (double)PyDataType_ELSIZE(descriptions[i]);
        uint64_t exact = (uint64_t)PyDataType_ELSIZE(descriptions[i]);
        arguments.field_ndim[i] = (uint8_t)ndim;
        words++;
        for (Py_ssize_t d = 0; d < ndim; d++) {
            uint64_t size = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, d));
            if (PyErr_Occurred()) {
                goto done;
            }
            bytes *= (double)size;
            exact *= size;
            arguments.shape[words++] = size;
        }
        if (bytes > (double)self->segment->c.record_limit) {
            exact = self->segment->c.record_limit;
        }
        arguments.field_bytes[i] = exact;
    }
    spec->field_count = (uint32_t)count;
    spec->shape = arguments.shape;
    spec->shape_words = words;
    spec->field_bytes = arguments.field_bytes;
    spec->field_ndim = arguments.field_ndim;
    uint64_t meta_bytes = spec->meta_bytes;
    spec->meta_bytes = meta_room > meta_bytes ? meta_room : meta_bytes;
    if (!schema_cache_find(&self->schemas, spec, fields, descriptions, arguments.field_ndim)) {
        goto done;
    }
    if (!record_plan(spec)) {
        PyErr_SetString(hooks.too_large_error, "the reservation is larger than any record");
        goto done;
    }
    struct reservation at;
    if (!claim(self, spec->record_bytes, arguments.timeout_s, &at)) {
        goto done;
    }
    slot = (SlotObject *)SlotType.tp_alloc(&SlotType, 0);
    if (slot == NULL) {
        goto done;
    }
    slot->keeper = keeper_new(self->segment, &at);
    if (slot->keeper == NULL) {
        slot->ended = true;
        Py_CLEAR(slot);
        goto done;
    }
    slot->writer = (WriterObject *)Py_NewRef((PyObject *)self);
    slot->at = at;
    slot->names = Py_NewRef(names);
    slot->count = (uint32_t)count;
    slot->meta_room = (uint32_t)spec->meta_bytes;
    slot->score = spec->score;
    spec->meta_bytes = meta_bytes;
    write_head(self, &arguments, &at);
    if (meta_bytes > 0) {
        memcpy((uint8_t *)at.record + spec->meta_offset,
               PyBytes_AS_STRING(arguments.meta_encoded), meta_bytes);
    }
    writer_reserve(&self->c, &at);
    slot->next = self->open;
    if (self->open != NULL) {
        self->open->previous = slot;
    }
    self->open = slot;
    words = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        npy_intp dims[SHMBUS_MAX_NDIM];
        slot->shape_at[i] = (uint16_t)words;
        uint64_t offset = arguments.shape[words++];
        for (int d = 0; d < arguments.field_ndim[i]; d++) {
            dims[d] = (npy_intp)arguments.shape[words++];
        }
        Py_INCREF(descriptions[i]);
        PyObject *array = PyArray_NewFromDescr(&PyArray_Type, descriptions[i],
                                               arguments.field_ndim[i], dims, NULL,
                                               (uint8_t *)at.record + offset,
                                               NPY_ARRAY_CARRAY, NULL);
        if (array == NULL || PyArray_SetBaseObject((PyArrayObject *)array,
                                                   Py_NewRef((PyObject *)slot->keeper)) < 0) {
            Py_XDECREF(array);
            Py_CLEAR(slot); /* its end aborts */
            goto done;
        }
        slot->arrays[i] = (PyArrayObject *)array;
    }
done:
    arguments_end(&arguments);
    return (PyObject *)slot;
}

static int slot_index_of(SlotObject *self, PyObject *name) {
    for (uint32_t i = 0; i < self->count; i++) {
        PyObject *own = PyTuple_GET_ITEM(self->names, i);
        if (own == name || (PyUnicode_Check(name) && PyUnicode_Compare(own, name) == 0)) {
            return (int)i;
        }
    }
    PyErr_SetObject(PyExc_KeyError, name);
    return -1;
}

static PyObject *slot_get(SlotObject *self, PyObject *name) {
    if (!slot_usable(self)) {
        return NULL;
    }
    int field = slot_index_of(self, name);
    return field < 0 ? NULL : Py_NewRef((PyObject *)self->arrays[field]);
}

/* resize(name, n): the first dimension ends up shorter than reserved. */
static PyObject *slot_resize(SlotObject *self, PyObject *args) {
    PyObject *name;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "Un", &name, &length) || !slot_usable(self)) {
        return NULL;
    }
    int field = slot_index_of(self, name);
    if (field < 0) {
        return NULL;
    }
    PyArrayObject *array = self->arrays[field];
    if (PyArray_NDIM(array) < 1 || length < 0 || length > PyArray_DIM(array, 0)) {
        PyErr_Format(PyExc_ValueError, "%U: expected 0 to %zd elements, got %zd", name,
                     PyArray_NDIM(array) < 1 ? (Py_ssize_t)0 : (Py_ssize_t)PyArray_DIM(array, 0),
                     length);
        return NULL;
    }
    npy_intp dims[SHMBUS_MAX_NDIM];
    memcpy(dims, PyArray_DIMS(array), (size_t)PyArray_NDIM(array) * sizeof *dims);
    dims[0] = length;
    Py_INCREF(PyArray_DESCR(array));
    PyObject *shorter =
        PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(array), PyArray_NDIM(array), dims, NULL,
                             PyArray_DATA(array), NPY_ARRAY_CARRAY, NULL);
    if (shorter == NULL || PyArray_SetBaseObject((PyArrayObject *)shorter,
                                                 Py_NewRef((PyObject *)self->keeper)) < 0) {
        Py_XDECREF(shorter);
        return NULL;
    }
    uint64_t *shape = (uint64_t *)(void *)((uint8_t *)self->at.record + sizeof *self->at.record);
    shape[self->shape_at[field] + 1] = (uint64_t)length;
    Py_SETREF(self->arrays[field], (PyArrayObject *)shorter);
    Py_RETURN_NONE;
}

static PyObject *slot_end(SlotObject *self, bool commit) {
    if (!slot_usable(self)) {
        return NULL;
    }
    slot_finish(self, commit);
    Py_RETURN_NONE;
}

static PyObject *slot_commit(SlotObject *self, PyObject *ignored) {
    (void)ignored;
    return slot_end(self, true);
}

static PyObject *slot_abort(SlotObject *self, PyObject *ignored) {
    (void)ignored;
    return slot_end(self, false);
}

static PyObject *slot_exit(SlotObject *self, PyObject *args) {
    PyObject *type = PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0) : Py_None;
    if (!self->ended) {
        PyObject *result = slot_end(self, type == Py_None);
        if (result == NULL) {
            return NULL;
        }
        Py_DECREF(result);
    }
    Py_RETURN_NONE;
}

static PyObject *slot_enter(SlotObject *self, PyObject *ignored) {
    (void)ignored;
    return slot_usable(self) ? Py_NewRef((PyObject *)self) : NULL;
}

static PyObject *slot_get_score(SlotObject *self, void *ignored) {
    (void)ignored;
    return PyFloat_FromDouble(self->score);
}

static int slot_set_score(SlotObject *self, PyObject *value, void *ignored) {
    (void)ignored;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "score cannot be deleted");
        return -1;
    }
    return slot_usable(self) && parse_score(value, &self->score) ? 0 : -1;
}

static int slot_set_meta(SlotObject *self, PyObject *value, void *ignored) {
    (void)ignored;
    if (!slot_usable(self)) {
        return -1;
    }
    struct record_header *record = self->at.record;
    if (value == NULL || value == Py_None) {
        record->meta_bytes = 0;
        return 0;
    }
    PyObject *encoded = PyObject_CallOneArg(hooks.encode_meta, value);
    if (encoded == NULL) {
        return -1;
    }
    Py_ssize_t bytes = PyBytes_Check(encoded) ? PyBytes_GET_SIZE(encoded) : 0;
    if (bytes > (Py_ssize_t)self->meta_room) {
        PyErr_Format(PyExc_ValueError,
                     "meta: encoded it takes %zd bytes, the reservation has room for %u; give "
                     "reserve() a larger meta_room",
                     bytes, self->meta_room);
        Py_DECREF(encoded);
        return -1;
    }
    memcpy((uint8_t *)record + record->meta_offset, PyBytes_AS_STRING(encoded), (size_t)bytes);
    record->meta_bytes = (uint32_t)bytes;
    Py_DECREF(encoded);
    return 0;
}

static void slot_dealloc(SlotObject *self) {
    if (self->writer != NULL) {
        bool own = self->writer->segment->generation == fork_generation &&
                   !self->writer->segment->handle_closed;
        if (!self->ended && own) {
            slot_finish(self, false);
        }
        slot_unlink(self);
    }
    for (uint32_t i = 0; i < self->count; i++) {
        Py_XDECREF(self->arrays[i]);
    }
    Py_XDECREF(self->keeper);
    Py_XDECREF(self->names);
    Py_XDECREF(self->writer);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *slot_get_ended(SlotObject *self, void *ignored) {
    (void)ignored;
    return PyBool_FromLong(self->ended);
}

static PyMethodDef slot_methods[] = {
    {"resize", (PyCFunction)(void (*)(void))slot_resize, METH_VARARGS, NULL},
    {"commit", (PyCFunction)(void (*)(void))slot_commit, METH_NOARGS, NULL},
    {"abort", (PyCFunction)(void (*)(void))slot_abort, METH_NOARGS, NULL},
    {"__enter__", (PyCFunction)(void (*)(void))slot_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))slot_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef slot_getset[] = {
    {"score", (getter)slot_get_score, (setter)slot_set_score, NULL, NULL},
    {"meta", NULL, (setter)slot_set_meta, NULL, NULL},
    {"ended", (getter)slot_get_ended, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef slot_members[] = {
    {"fields", T_OBJECT_EX, offsetof(SlotObject, names), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMappingMethods slot_mapping = {.mp_subscript = (binaryfunc)slot_get};

PyTypeObject SlotType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Slot",
    .tp_basicsize = sizeof(SlotObject),
    .tp_dealloc = (destructor)slot_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = slot_methods,
    .tp_getset = slot_getset,
    .tp_members = slot_members,
    .tp_as_mapping = &slot_mapping,
};

/* ---- The end of a writer ---- */

static void writer_end(WriterObject *self) {
    if (!self->attached) {
        return;
    }
    self->attached = false;
    if (self->segment->generation != fork_generation || self->segment->handle_closed) {
        return;
    }
    while (self->open != NULL) {
        slot_finish(self->open, false);
    }
    writer_close(&self->c);
    segment_release_handle(self->segment);
}

static PyObject *writer_py_close(WriterObject *self, PyObject *ignored) {
    (void)ignored;
    writer_end(self);
    Py_RETURN_NONE;
}

static void writer_dealloc(WriterObject *self) {
    if (self->segment != NULL) {
        writer_end(self);
    }
    schema_cache_clear(&self->schemas);
    Py_XDECREF(self->segment);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *writer_counts(WriterObject *self, PyObject *ignored) {
    (void)ignored;
    return Py_BuildValue("(KKKK)", (unsigned long long)self->c.sequence,
                         (unsigned long long)self->c.aborted, (unsigned long long)self->bytes,
                         (unsigned long long)self->full_waits);
}

static PyObject *writer_get_closed(WriterObject *self, void *ignored) {
    (void)ignored;
    return PyBool_FromLong(!self->attached || self->segment->handle_closed ||
                           self->segment->generation != fork_generation);
}

static PyMethodDef writer_methods[] = {
    {"put", (PyCFunction)(void (*)(void))writer_put, METH_FASTCALL | METH_KEYWORDS,
     "put(instance_id, *, group_size, index, score=0.0, policy_version=0, epoch=None, meta=None,\n"
     "    timeout=None, **arrays)\n--\n\n"
     "Copy one trajectory into the ring and commit it; see shmbus.Producer."},
    {"put_many", (PyCFunction)(void (*)(void))writer_put_many, METH_VARARGS | METH_KEYWORDS,
     "put_many(items, *, timeout=None)\n--\n\n"
     "Put a list of dicts of put's arguments; see shmbus.Producer."},
    {"_reserve", (PyCFunction)(void (*)(void))writer_reserve_slot, METH_VARARGS, NULL},
    {"_await_space", (PyCFunction)(void (*)(void))writer_await_space, METH_O, NULL},
    {"_counts", (PyCFunction)(void (*)(void))writer_counts, METH_NOARGS, NULL},
    {"close", (PyCFunction)(void (*)(void))writer_py_close, METH_NOARGS,
     "close()\n--\n\nAbort open reservations and leave the bus; what was committed stays."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef writer_getset[] = {
    {"closed", (getter)writer_get_closed, NULL, "True after close() and after a fork.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef writer_members[] = {
    {"_segment", T_OBJECT_EX, offsetof(WriterObject, segment), READONLY, NULL},
    {"producer_id", T_ULONGLONG, offsetof(WriterObject, c.producer_id), READONLY,
     "This producer's number; never used again on this bus."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject WriterType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Writer",
    .tp_basicsize = sizeof(WriterObject),
    .tp_dealloc = (destructor)writer_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_methods = writer_methods,
    .tp_getset = writer_getset,
    .tp_members = writer_members,
    .tp_init = (initproc)writer_init,
    .tp_new = PyType_GenericNew,
};
