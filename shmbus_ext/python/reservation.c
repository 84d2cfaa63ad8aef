/* Slot: a reservation, whose arrays are filled in the ring itself.
 *
 * Invariants: a slot ends once, by commit or abort, at the latest when it is collected. After that
 * nothing is written through its arrays: they are read-only, and where somebody holds views of them
 * the record's space is kept until those are gone. */
#include "binding.h"

#include "ring/doorbell.h"

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

/* What is committed must not change: where somebody may still write into the reserved place,
 * through a slice or a memoryview, the record is committed as a copy and the place is given up.
 * With no room for a copy it is committed where it is, and kept out of everybody else's way. */
static void move_from_views(SlotObject *self) {
    struct writer *writer = &self->writer->c;
    struct reservation copy;
    if (!self->keeper->pinned || writer_claim(writer, self->at.bytes, &copy) != WRITER_OK) {
        return;
    }
    const struct record_header *from = self->at.record;
    memcpy((uint8_t *)copy.record + 8, (const uint8_t *)from + 8, self->at.bytes - 8);
    record_write_frame(copy.record, &copy.place, copy.bytes, from->producer_id, from->slot,
                       from->flags);
    writer_reserve(writer, &copy);
    writer_abort(writer, &self->at);
    self->at = copy;
}

static void slot_finish(SlotObject *self, bool commit) {
    slot_take_arrays(self);
    self->ended = true;
    slot_unlink(self);
    if (commit) {
        move_from_views(self);
        self->at.record->score = self->score;
        self->at.record->policy_version = self->policy_version;
        writer_commit(&self->writer->c, &self->at);
        self->writer->bytes += self->at.bytes;
    } else {
        writer_abort(&self->writer->c, &self->at);
    }
    if (commit) {
        writer_tell_reader(self->writer);
    } else {
        doorbell_ring(self->writer->segment->c.header);
    }
}

static bool slot_usable(SlotObject *self) {
    if (self->ended) {
        PyErr_SetString(hooks.closed_error,
                        "this reservation has been committed or aborted; reserve a new one");
        return false;
    }
    return writer_usable(self->writer);
}

struct field_list {
    PyObject *names;  /* tuple of str */
    PyObject *dtypes; /* tuple of dtype */
    PyObject *shapes; /* tuple of tuple of int */
};

/* Sizes of the fields into the arguments, as put takes them from arrays. */
static bool take_shapes(struct put_arguments *arguments, const struct field_list *fields,
                        uint64_t limit) {
    uint32_t words = 0;
    Py_ssize_t count = PyTuple_GET_SIZE(fields->names);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *shape = PyTuple_GET_ITEM(fields->shapes, i);
        Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
        if (ndim > (Py_ssize_t)SHMBUS_MAX_NDIM || words + 1 + ndim > SHMBUS_MAX_SHAPE_WORDS) {
            PyErr_Format(PyExc_ValueError, "%U: expected at most %u dimensions, got %zd",
                         PyTuple_GET_ITEM(fields->names, i), SHMBUS_MAX_NDIM, ndim);
            return false;
        }
        uint64_t bytes =
            (uint64_t)PyDataType_ELSIZE((PyArray_Descr *)PyTuple_GET_ITEM(fields->dtypes, i));
        double estimate = (double)bytes;
        arguments->field_ndim[i] = (uint8_t)ndim;
        words++;
        for (Py_ssize_t d = 0; d < ndim; d++) {
            uint64_t size = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, d));
            if (PyErr_Occurred()) {
                return false;
            }
            estimate *= (double)size;
            bytes *= size;
            arguments->shape[words++] = size;
        }
        /* A product that overflows is above any limit, and must stay so. */
        arguments->field_bytes[i] = estimate > (double)limit ? limit + 1 : bytes;
    }
    arguments->spec.shape_words = words;
    return true;
}

/* All that can be refused before anything is taken from the ring. */
static bool plan_reservation(WriterObject *self, struct put_arguments *arguments, PyObject *head,
                             const struct field_list *fields, uint64_t meta_room) {
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    PyObject *names[SHMBUS_MAX_FIELDS];
    struct record_spec *spec = &arguments->spec;
    Py_ssize_t count = PyTuple_GET_SIZE(fields->names);
    if (!arguments_take_mapping(arguments, head) || !arguments_finish_head(arguments)) {
        return false;
    }
    if (count > (Py_ssize_t)SHMBUS_MAX_FIELDS || PyTuple_GET_SIZE(fields->dtypes) != count ||
        PyTuple_GET_SIZE(fields->shapes) != count) {
        PyErr_Format(PyExc_ValueError, "fields: expected at most %u, got %zd", SHMBUS_MAX_FIELDS,
                     count);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        names[i] = PyTuple_GET_ITEM(fields->names, i);
        dtypes[i] = (PyArray_Descr *)PyTuple_GET_ITEM(fields->dtypes, i);
    }
    if (!take_shapes(arguments, fields, self->segment->c.record_limit)) {
        return false;
    }
    spec->field_count = (uint32_t)count;
    spec->shape = arguments->shape;
    spec->field_bytes = arguments->field_bytes;
    spec->field_ndim = arguments->field_ndim;
    arguments->schema =
        schema_cache_find(&self->schemas, spec, names, dtypes, arguments->field_ndim);
    if (arguments->schema == NULL) {
        return false;
    }
    spec->meta_bytes = meta_room > spec->meta_bytes ? meta_room : spec->meta_bytes;
    if (!record_plan(spec)) {
        PyErr_SetString(hooks.too_large_error, "the reservation is larger than any record");
        return false;
    }
    return true;
}

static PyObject *field_view(SlotObject *slot, PyArray_Descr *dtype, int ndim,
                            const uint64_t *shape) {
    npy_intp dims[SHMBUS_MAX_NDIM];
    for (int d = 0; d < ndim; d++) {
        dims[d] = (npy_intp)shape[1 + d];
    }
    Py_INCREF(dtype);
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, dtype, ndim, dims, NULL,
                             (uint8_t *)slot->at.record + shape[0], NPY_ARRAY_CARRAY, NULL);
    if (array != NULL && PyArray_SetBaseObject((PyArrayObject *)array,
                                               Py_NewRef((PyObject *)slot->keeper)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* The Python side of a reservation; its arrays come afterwards. */
static SlotObject *slot_new(WriterObject *writer, const struct reservation *at, PyObject *names) {
    SlotObject *slot = (SlotObject *)SlotType.tp_alloc(&SlotType, 0);
    if (slot == NULL) {
        return NULL;
    }
    slot->ended = true; /* until the record is exposed */
    slot->keeper = keeper_new(writer->segment, at);
    if (slot->keeper == NULL) {
        Py_DECREF(slot);
        return NULL;
    }
    slot->writer = (WriterObject *)Py_NewRef((PyObject *)writer);
    slot->at = *at;
    slot->names = Py_NewRef(names);
    return slot;
}

static void slot_open(SlotObject *slot, struct put_arguments *arguments, uint64_t meta_bytes) {
    WriterObject *writer = slot->writer;
    struct record_spec *spec = &arguments->spec;
    slot->meta_room = (uint32_t)spec->meta_bytes;
    slot->score = spec->score;
    slot->policy_version = spec->policy_version;
    spec->meta_bytes = meta_bytes;
    writer_write_head(writer, arguments, &slot->at);
    if (meta_bytes > 0) {
        memcpy((uint8_t *)slot->at.record + spec->meta_offset,
               PyBytes_AS_STRING(arguments->meta_encoded), meta_bytes);
    }
    writer_reserve(&writer->c, &slot->at);
    slot->ended = false;
    slot->next = writer->open;
    if (writer->open != NULL) {
        writer->open->previous = slot;
    }
    writer->open = slot;
}

static bool slot_make_views(SlotObject *slot, const struct put_arguments *arguments,
                            PyObject *dtypes) {
    uint32_t words = 0;
    for (uint32_t i = 0; i < arguments->spec.field_count; i++) {
        PyObject *array = field_view(slot, (PyArray_Descr *)PyTuple_GET_ITEM(dtypes, i),
                                     arguments->field_ndim[i], arguments->shape + words);
        if (array == NULL) {
            return false;
        }
        slot->arrays[i] = (PyArrayObject *)array;
        slot->shape_at[i] = (uint16_t)words;
        slot->count = i + 1;
        words += 1u + arguments->field_ndim[i];
    }
    return true;
}

/* reserve(head: dict of put's arguments but arrays, names: tuple[str], dtypes: tuple[dtype],
 * shapes: tuple[tuple[int]], meta_room: int) -> Slot */
PyObject *writer_reserve_slot(WriterObject *self, PyObject *args) {
    PyObject *head;
    struct field_list fields;
    unsigned int meta_room;
    if (!PyArg_ParseTuple(args, "O!O!O!O!I", &PyDict_Type, &head, &PyTuple_Type, &fields.names,
                          &PyTuple_Type, &fields.dtypes, &PyTuple_Type, &fields.shapes,
                          &meta_room) ||
        !writer_usable(self)) {
        return NULL;
    }
    struct put_arguments arguments;
    struct reservation at;
    SlotObject *slot = NULL;
    arguments_begin(&arguments);
    bool claimed = plan_reservation(self, &arguments, head, &fields, meta_room) &&
                   writer_usable(self); /* encoding may have let another thread close it */
    if (claimed) {
        claimed = writer_claim_room(self, arguments.spec.record_bytes, arguments.timeout_s, &at);
    }
    if (claimed) {
        slot = slot_new(self, &at, fields.names);
    }
    if (slot != NULL) {
        slot_open(slot, &arguments,
                  arguments.meta_encoded == NULL
                      ? 0
                      : (uint64_t)PyBytes_GET_SIZE(arguments.meta_encoded));
        if (!slot_make_views(slot, &arguments, fields.dtypes)) {
            Py_CLEAR(slot); /* its end aborts */
        }
    }
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
    PyErr_Format(PyExc_KeyError, "%R: this reservation has the fields %R", name, self->names);
    return -1;
}

/* Not an assignment of one's own array: what is to be committed is in the ring already. */
static int slot_assign(SlotObject *self, PyObject *name, PyObject *value) {
    (void)self;
    (void)value;
    PyErr_Format(PyExc_TypeError,
                 "a field of a reservation cannot be replaced; write into its view: slot[%R][:] = "
                 "...",
                 name);
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
    uint64_t *shape = (uint64_t *)(void *)((uint8_t *)self->at.record + sizeof *self->at.record) +
                      self->shape_at[field];
    uint64_t before = shape[1];
    shape[1] = (uint64_t)length;
    PyObject *shorter = field_view(self, PyArray_DESCR(array), PyArray_NDIM(array), shape);
    if (shorter == NULL) {
        shape[1] = before;
        return NULL;
    }
    /* What was handed out before is no longer the field: it is not written through any more. */
    PyArray_CLEARFLAGS(array, NPY_ARRAY_WRITEABLE);
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
    bool set = is_given(value, "score") && slot_usable(self) && parse_score(value, &self->score);
    return set ? 0 : -1;
}

static PyObject *slot_get_policy_version(SlotObject *self, void *ignored) {
    (void)ignored;
    return PyLong_FromLongLong(self->policy_version);
}

static int slot_set_policy_version(SlotObject *self, PyObject *value, void *ignored) {
    (void)ignored;
    bool set = is_given(value, "policy_version") && slot_usable(self) &&
               parse_policy_version(value, &self->policy_version);
    return set ? 0 : -1;
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
    {"resize", (PyCFunction)(void (*)(void))slot_resize, METH_VARARGS,
     "resize(name, length, /)\n--\n\n"
     "Cut the first dimension of a field to what was really written; slot[name] is shorter then."},
    {"commit", (PyCFunction)(void (*)(void))slot_commit, METH_NOARGS,
     "commit()\n--\n\n"
     "Publish the record, as leaving the with block does; its views are read-only from then on."},
    {"abort", (PyCFunction)(void (*)(void))slot_abort, METH_NOARGS,
     "abort()\n--\n\n"
     "Give the space back; nobody sees the record. An exception in the with block does so too."},
    {"__enter__", (PyCFunction)(void (*)(void))slot_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))slot_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef slot_getset[] = {
    {"score", (getter)slot_get_score, (setter)slot_set_score, "The reward, 0.0 unless set.", NULL},
    {"policy_version", (getter)slot_get_policy_version, (setter)slot_set_policy_version,
     "The policy that sampled it, 0 unless set.", NULL},
    {"meta", NULL, (setter)slot_set_meta,
     "Whatever msgspec can encode, within reserve's meta_room; it can be set, not read.", NULL},
    {"ended", (getter)slot_get_ended, NULL, "Whether it was committed or aborted.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef slot_members[] = {
    {"fields", T_OBJECT_EX, offsetof(SlotObject, names), READONLY,
     "The names of its arrays."},
    {NULL, 0, 0, 0, NULL},
};

static PyMappingMethods slot_mapping = {.mp_subscript = (binaryfunc)slot_get,
                                        .mp_ass_subscript = (objobjargproc)slot_assign};

PyTypeObject SlotType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Slot",
    .tp_basicsize = sizeof(SlotObject),
    .tp_dealloc = (destructor)slot_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A reservation: slot[name] is a writable view of the ring until commit or abort.",
    .tp_methods = slot_methods,
    .tp_getset = slot_getset,
    .tp_members = slot_members,
    .tp_as_mapping = &slot_mapping,
};

void writer_abort_open(WriterObject *self) {
    while (self->open != NULL) {
        slot_finish(self->open, false);
    }
}
