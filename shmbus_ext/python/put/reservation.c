/* Reservation: a record whose arrays are filled in the ring, in place.
 *
 * Invariants: a reservation ends once, by commit or abort, at the latest at its collection.
 * Afterwards its arrays are read-only, and outstanding views keep the record's space allocated. */
#include "python/put/put.h"

#include "public_docs.h"

/* ---- The room of a reservation.
 *
 * Invariant: planning takes nothing from the ring. */
struct field_list {
    PyObject *names;  /* tuple of str */
    PyObject *dtypes; /* tuple of dtype */
    PyObject *shapes; /* tuple of tuple of int */
};

/* Fill in the fields' sizes, like put from arrays. */
static bool take_shapes(struct put_arguments *arguments, const struct field_list *fields) {
    uint32_t words = 0;
    Py_ssize_t count = PyTuple_GET_SIZE(fields->names);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *shape = PyTuple_GET_ITEM(fields->shapes, i);
        Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
        if (!py_arguments_shape_fits(PyTuple_GET_ITEM(fields->names, i), words, ndim)) {
            return false;
        }
        uint64_t *sizes = arguments->shape + words + 1;
        for (Py_ssize_t d = 0; d < ndim; d++) {
            sizes[d] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, d));
            if (PyErr_Occurred()) {
                return false;
            }
        }
        arguments->field_ndim[i] = (uint8_t)ndim;
        arguments->field_bytes[i] = py_field_bytes(arguments->dtypes[i], (int)ndim, sizes);
        words += 1u + (uint32_t)ndim;
    }
    arguments->spec.shape_words = words;
    return true;
}

/* Check the fields against the schema; false with an exception. `shape`: a word plus the sizes per
 * field. */
static bool py_check_declared(const DeclaredSchemaObject *declared, PyObject *const *names,
                              PyArray_Descr *const *dtypes, uint32_t count, const uint8_t *ndim,
                              const uint64_t *shape) {
    uint8_t fields[SHMBUS_MAX_FIELDS];
    struct declared_bindings bindings;
    bindings.bound = 0;
    if (!py_declared_match(declared, names, count, fields)) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (fields[i] == DECLARED_BY_THE_CORE) {
            shape += 1 + ndim[i];
            continue;
        }
        if (!py_same_dtype(dtypes[i], declared->dtypes[fields[i]])) {
            PyObject *wanted = py_dtype_text(declared->dtypes[fields[i]]);
            PyObject *got = py_dtype_text(dtypes[i]);
            if (wanted != NULL && got != NULL) {
                PyErr_Format(PyExc_TypeError, "%U: expected %U, as the schema has it, got %U",
                             names[i], wanted, got);
            }
            Py_XDECREF(wanted);
            Py_XDECREF(got);
            return false;
        }
        if (!py_declared_fits(declared, &bindings, fields[i], ndim[i], shape + 1)) {
            return false;
        }
        shape += 1 + ndim[i];
    }
    return true;
}

/* Check everything refusable before taking room in the ring; false with an exception. */
static bool py_plan_reservation(WriterObject *self, struct put_arguments *arguments, PyObject *head,
                                const struct field_list *fields, uint64_t meta_room) {
    Py_ssize_t count = PyTuple_GET_SIZE(fields->names);
    if (!py_arguments_take_mapping(arguments, head) || !py_arguments_finish_head(arguments)) {
        return false;
    }
    if (count > (Py_ssize_t)SHMBUS_MAX_FIELDS || PyTuple_GET_SIZE(fields->dtypes) != count ||
        PyTuple_GET_SIZE(fields->shapes) != count) {
        return py_refuse(PyExc_ValueError, "fields: expected at most %u, got %zd",
                         SHMBUS_MAX_FIELDS, count);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        arguments->names[i] = PyTuple_GET_ITEM(fields->names, i); /* borrowed: no arrays yet */
        arguments->dtypes[i] = (PyArray_Descr *)PyTuple_GET_ITEM(fields->dtypes, i);
    }
    if (!take_shapes(arguments, fields)) {
        return false;
    }
    arguments->declared = Py_XNewRef((PyObject *)self->declared);
    if (self->declared != NULL &&
        !py_check_declared(self->declared, arguments->names, arguments->dtypes, (uint32_t)count,
                           arguments->field_ndim, arguments->shape)) {
        return false;
    }
    return py_arguments_plan(arguments, &self->schemas, (uint32_t)count,
                             Py_MAX(meta_room, arguments->spec.meta_bytes),
                             "the reservation is larger than any record");
}

/* ---- The reservation. */
/* Take the arrays back. An array still held elsewhere becomes read-only, and its record's space is
 * kept until it is gone, for views unknown to shmbus. */
static void py_reservation_take_arrays(ReservationObject *self) {
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

/* A committed record must not change. If a slice or memoryview may still write into the reserved
 * place, commit a copy and give up the place. Without room for a copy, commit in place and keep the
 * record apart from other records. */
static void move_from_views(ReservationObject *self) {
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
    copy.admitted = self->at.admitted;
    self->at.admitted = 0; /* the copy keeps its group's admission */
    writer_abort(writer, &self->at);
    self->at = copy;
}

static void py_reservation_finish(ReservationObject *self, bool commit) {
    py_reservation_take_arrays(self);
    self->ended = true;
    list_unlink(&self->link);
    if (!commit) {
        writer_abort(&self->writer->c, &self->at);
        doorbell_ring(self->writer->segment->c.header);
        return;
    }
    move_from_views(self);
    self->at.record->score = self->score;
    self->at.record->policy_version = self->policy_version;
    self->at.record->version_span = self->version_span;
    writer_commit(&self->writer->c, &self->at);
    self->writer->bytes += self->at.bytes;
    py_writer_tell_reader(self->writer);
}

static bool py_reservation_usable(ReservationObject *self) {
    if (self->ended) {
        return py_refuse(hooks.closed_error,
                         "this reservation has been committed or aborted; reserve a new one");
    }
    return py_writer_usable(self->writer);
}

/* Check the final sizes of the fields against the schema; false with an exception. */
static bool check_sizes(ReservationObject *self) {
    PyObject *names[SHMBUS_MAX_FIELDS];
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    uint8_t ndim[SHMBUS_MAX_FIELDS];
    uint64_t shape[SHMBUS_MAX_SHAPE_WORDS];
    uint64_t *at = shape;
    for (uint32_t i = 0; i < self->count; i++) {
        names[i] = PyTuple_GET_ITEM(self->names, i);
        dtypes[i] = PyArray_DESCR(self->arrays[i]);
        ndim[i] = (uint8_t)PyArray_NDIM(self->arrays[i]);
        for (int d = 0; d < ndim[i]; d++) {
            at[1 + d] = (uint64_t)PyArray_DIM(self->arrays[i], d);
        }
        at += 1 + ndim[i];
    }
    return py_check_declared((const DeclaredSchemaObject *)self->declared, names, dtypes,
                             self->count, ndim, shape);
}

static PyObject *field_view(ReservationObject *self, PyArray_Descr *dtype, int ndim,
                            const uint64_t *shape) {
    return py_array_over(dtype, ndim, shape + 1, (uint8_t *)self->at.record + shape[0],
                         NPY_ARRAY_CARRAY, (PyObject *)self->keeper);
}

/* Make the Python side of a reservation, without arrays. */
static ReservationObject *py_reservation_new(WriterObject *writer, const struct reservation *at,
                                             PyObject *names) {
    ReservationObject *made = (ReservationObject *)ReservationType.tp_alloc(&ReservationType, 0);
    if (made == NULL) {
        return NULL;
    }
    made->ended = true; /* until the record is exposed */
    made->keeper = py_keeper_new(writer->segment, at);
    if (made->keeper == NULL) {
        Py_DECREF(made);
        return NULL;
    }
    made->writer = (WriterObject *)Py_NewRef((PyObject *)writer);
    made->at = *at;
    made->names = Py_NewRef(names);
    return made;
}

static void py_reservation_open(ReservationObject *self, struct put_arguments *arguments,
                                uint64_t meta_bytes) {
    WriterObject *writer = self->writer;
    struct record_spec *spec = &arguments->spec;
    self->declared = Py_XNewRef(arguments->declared);
    self->meta_room = (uint32_t)spec->meta_bytes;
    self->meta_offset = spec->meta_offset;
    self->score = spec->score;
    self->policy_version = spec->policy_version;
    self->version_span = spec->version_span;
    spec->meta_bytes = meta_bytes;
    py_writer_write_head(writer, arguments, &self->at);
    if (meta_bytes > 0) {
        memcpy((uint8_t *)self->at.record + spec->meta_offset,
               PyBytes_AS_STRING(arguments->meta_encoded), meta_bytes);
    }
    writer_reserve(&writer->c, &self->at);
    self->ended = false;
    list_insert_before(&writer->reservations, &self->link);
}

static bool py_reservation_make_views(ReservationObject *self,
                                      const struct put_arguments *arguments, PyObject *dtypes) {
    uint32_t words = 0;
    for (uint32_t i = 0; i < arguments->spec.field_count; i++) {
        PyObject *array = field_view(self, (PyArray_Descr *)PyTuple_GET_ITEM(dtypes, i),
                                     arguments->field_ndim[i], arguments->shape + words);
        if (array == NULL) {
            return false;
        }
        self->arrays[i] = (PyArrayObject *)array;
        self->shape_at[i] = (uint16_t)words;
        self->count = i + 1;
        words += 1u + arguments->field_ndim[i];
    }
    return true;
}

PyObject *py_writer_reserve(WriterObject *self, PyObject *args) {
    PyObject *head;
    struct field_list fields;
    unsigned int meta_room;
    if (!PyArg_ParseTuple(args, "O!O!O!O!I", &PyDict_Type, &head, &PyTuple_Type, &fields.names,
                          &PyTuple_Type, &fields.dtypes, &PyTuple_Type, &fields.shapes,
                          &meta_room) ||
        !py_writer_usable(self)) {
        return NULL;
    }
    struct put_fields put_fields;
    struct put_arguments arguments;
    struct reservation at;
    ReservationObject *made = NULL;
    py_arguments_begin(&arguments, &put_fields);
    if (!py_plan_reservation(self, &arguments, head, &fields, meta_room) ||
        !py_writer_usable(self)) { /* a second thread may close the writer during encoding */
        goto end;
    }
    struct wanted_room wanted = py_writer_wants(self, &arguments);
    if (!py_writer_claim_room(self, &wanted, arguments.timeout_s, &at) ||
        !py_writer_find_split(self, &arguments, &at)) {
        goto end;
    }
    made = py_reservation_new(self, &at, fields.names);
    if (made == NULL) {
        py_writer_leave_room(self, &at);
        goto end;
    }
    PyObject *meta = arguments.meta_encoded;
    py_reservation_open(made, &arguments, meta == NULL ? 0 : (uint64_t)PyBytes_GET_SIZE(meta));
    if (!py_reservation_make_views(made, &arguments, fields.dtypes)) {
        Py_CLEAR(made); /* the deallocation aborts */
    }
end:
    py_arguments_end(&arguments);
    return (PyObject *)made;
}

static int py_reservation_index_of(ReservationObject *self, PyObject *name) {
    int field = py_find_name(self->names, self->count, name);
    if (field < 0) {
        PyErr_Format(PyExc_KeyError, "%R: this reservation has the fields %R", name, self->names);
    }
    return field;
}

/* Refuse assignment: the field's array lies in the ring already. */
static int py_reservation_assign(ReservationObject *Py_UNUSED(self), PyObject *name,
                                 PyObject *Py_UNUSED(value)) {
    PyErr_Format(PyExc_TypeError,
                 "a field of a reservation cannot be replaced; write into its view: slot[%R][:] = "
                 "...",
                 name);
    return -1;
}

static PyObject *py_reservation_get(ReservationObject *self, PyObject *name) {
    if (!py_reservation_usable(self)) {
        return NULL;
    }
    int field = py_reservation_index_of(self, name);
    return field < 0 ? NULL : Py_NewRef((PyObject *)self->arrays[field]);
}

/* Convert a length, -1 if out of range; false with a TypeError. */
static bool take_length(PyObject *value, int64_t *length) {
    if (py_take_integer(value, "length", 0, INT64_MAX, length)) {
        return true;
    }
    if (!PyErr_ExceptionMatches(PyExc_ValueError)) {
        return false;
    }
    PyErr_Clear();
    *length = -1;
    return true;
}

/* resize(name, n): shorten the first dimension below the reserved size. */
static PyObject *py_reservation_resize(ReservationObject *self, PyObject *args) {
    PyObject *name, *given;
    int64_t length;
    if (!PyArg_ParseTuple(args, "UO", &name, &given) || !py_reservation_usable(self) ||
        !take_length(given, &length)) {
        return NULL;
    }
    int field = py_reservation_index_of(self, name);
    if (field < 0) {
        return NULL;
    }
    PyArrayObject *array = self->arrays[field];
    if (PyArray_NDIM(array) < 1 || length < 0 || length > PyArray_DIM(array, 0)) {
        return PyErr_Format(
            PyExc_ValueError, "%U: expected 0 to %zd elements, got %R", name,
            PyArray_NDIM(array) < 1 ? (Py_ssize_t)0 : (Py_ssize_t)PyArray_DIM(array, 0), given);
    }
    uint64_t *shape = (uint64_t *)(void *)((uint8_t *)self->at.record + sizeof *self->at.record) +
                      self->shape_at[field];
    self->resized = true;
    uint64_t before = shape[1];
    shape[1] = (uint64_t)length;
    PyObject *shorter = field_view(self, PyArray_DESCR(array), PyArray_NDIM(array), shape);
    if (shorter == NULL) {
        shape[1] = before;
        return NULL;
    }
    /* The earlier array no longer backs the field: make it read-only. */
    PyArray_CLEARFLAGS(array, NPY_ARRAY_WRITEABLE);
    Py_SETREF(self->arrays[field], (PyArrayObject *)shorter);
    Py_RETURN_NONE;
}

static PyObject *py_reservation_end(ReservationObject *self, bool commit) {
    if (!py_reservation_usable(self) ||
        (commit && self->resized && self->declared != NULL && !check_sizes(self))) {
        return NULL;
    }
    py_reservation_finish(self, commit);
    Py_RETURN_NONE;
}

static PyObject *py_reservation_commit(ReservationObject *self, PyObject *Py_UNUSED(ignored)) {
    return py_reservation_end(self, true);
}

static PyObject *py_reservation_abort(ReservationObject *self, PyObject *Py_UNUSED(ignored)) {
    return py_reservation_end(self, false);
}

static PyObject *py_reservation_exit(ReservationObject *self, PyObject *args) {
    PyObject *type = PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0) : Py_None;
    if (!self->ended) {
        PyObject *result = py_reservation_end(self, type == Py_None);
        if (result == NULL && type != Py_None && PyErr_ExceptionMatches(hooks.closed_error)) {
            /* A forked child owns no part of the reservation. Keep the exception that ended the
             * block, like the child's SystemExit. */
            PyErr_Clear();
            Py_RETURN_NONE;
        }
        if (result == NULL && !self->ended && self->resized) {
            /* The sizes violate the schema, and the block's end leaves no chance to repair them. */
            PyObject *error = py_set_aside_error();
            Py_XDECREF(py_reservation_end(self, false));
            PyErr_Clear();
            py_restore_error(error);
        }
        if (result == NULL) {
            return NULL;
        }
        Py_DECREF(result);
    }
    Py_RETURN_NONE;
}

static PyObject *py_reservation_enter(ReservationObject *self, PyObject *Py_UNUSED(ignored)) {
    return py_reservation_usable(self) ? Py_NewRef((PyObject *)self) : NULL;
}

static PyObject *py_reservation_get_score(ReservationObject *self, void *Py_UNUSED(ignored)) {
    return isnan(self->score) ? Py_NewRef(Py_None) : PyFloat_FromDouble(self->score);
}

static int py_reservation_set_score(ReservationObject *self, PyObject *value,
                                    void *Py_UNUSED(ignored)) {
    bool set = py_is_given(value, "score") && py_reservation_usable(self) &&
               py_parse_score(value, &self->score);
    return set ? 0 : -1;
}

static PyObject *py_reservation_get_policy_version(ReservationObject *self,
                                                   void *Py_UNUSED(ignored)) {
    return self->version_span == 0
               ? PyLong_FromLongLong(self->policy_version)
               : Py_BuildValue("(LL)", (long long)self->policy_version,
                               (long long)self->policy_version + (long long)self->version_span);
}

static int py_reservation_set_policy_version(ReservationObject *self, PyObject *value,
                                             void *Py_UNUSED(ignored)) {
    bool set = py_is_given(value, "policy_version") && py_reservation_usable(self) &&
               py_parse_policy_versions(value, &self->policy_version, &self->version_span);
    return set ? 0 : -1;
}

static int py_reservation_set_meta(ReservationObject *self, PyObject *value,
                                   void *Py_UNUSED(ignored)) {
    if (!py_reservation_usable(self)) {
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
    /* Encoding runs foreign code, which may end this reservation, and lets other threads do the
     * same. */
    if (!py_reservation_usable(self)) {
        Py_DECREF(encoded);
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
    memcpy((uint8_t *)record + self->meta_offset, PyBytes_AS_STRING(encoded), (size_t)bytes);
    record->meta_bytes = (uint32_t)bytes;
    Py_DECREF(encoded);
    return 0;
}

static void py_reservation_dealloc(ReservationObject *self) {
    if (self->writer != NULL) {
        bool own = self->writer->segment->generation == fork_generation &&
                   !self->writer->segment->handle_closed;
        if (!self->ended && own) {
            py_reservation_finish(self, false);
        }
        list_unlink(&self->link);
    }
    for (uint32_t i = 0; i < self->count; i++) {
        Py_XDECREF(self->arrays[i]);
    }
    Py_XDECREF(self->keeper);
    Py_XDECREF(self->declared);
    Py_XDECREF(self->names);
    Py_XDECREF(self->writer);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef reservation_methods[] = {
    METHOD("resize", py_reservation_resize, METH_VARARGS, DOC_Reservation_resize),
    METHOD("commit", py_reservation_commit, METH_NOARGS, DOC_Reservation_commit),
    METHOD("abort", py_reservation_abort, METH_NOARGS, DOC_Reservation_abort),
    METHOD("__enter__", py_reservation_enter, METH_NOARGS, NULL),
    METHOD("__exit__", py_reservation_exit, METH_VARARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reservation_getset[] = {
    {"score", (getter)py_reservation_get_score, (setter)py_reservation_set_score,
     DOC_Reservation_score, NULL},
    {"policy_version", (getter)py_reservation_get_policy_version,
     (setter)py_reservation_set_policy_version, DOC_Reservation_policy_version, NULL},
    {"meta", NULL, (setter)py_reservation_set_meta, DOC_Reservation_meta, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef reservation_members[] = {
    {"fields", T_OBJECT_EX, offsetof(ReservationObject, names), READONLY, DOC_Reservation_fields},
    {"ended", T_BOOL, offsetof(ReservationObject, ended), READONLY, DOC_Reservation_ended},
    {NULL, 0, 0, 0, NULL},
};

static PyMappingMethods reservation_mapping = {.mp_subscript = (binaryfunc)py_reservation_get,
                                        .mp_ass_subscript = (objobjargproc)py_reservation_assign};

PyTypeObject ReservationType = {
    TYPE_BASICS("Reservation", ReservationObject, py_reservation_dealloc, 0),
    .tp_doc = DOC_Reservation,
    .tp_methods = reservation_methods,
    .tp_getset = reservation_getset,
    .tp_members = reservation_members,
    .tp_as_mapping = &reservation_mapping,
};

void py_writer_abort_open(WriterObject *self) {
    while (!list_is_empty(&self->reservations)) {
        py_reservation_finish(LIST_ENTRY(self->reservations.next, ReservationObject, link), false);
    }
}
