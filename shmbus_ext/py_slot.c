/* Slot: a reservation, whose arrays are filled in the ring itself.
 *
 * Invariants: a slot ends once, by commit or abort, at the latest when it is collected. After that
 * nothing is written through its arrays: they are read-only, and where somebody holds views of them
 * the record's space is kept until those are gone. */
#include "pyapi.h"

#include "doorbell.h"

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
PyObject *writer_reserve_slot(WriterObject *self, PyObject *args) {
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
    if (!arguments_take_mapping(&arguments, head, 0) || !arguments_finish_head(&arguments)) {
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
    if (!writer_usable(self)) {
        goto done;
    }
    self->busy++;
    bool claimed = writer_claim_room(self, spec->record_bytes, arguments.timeout_s, &at);
    self->busy--;
    if (!claimed) {
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
    writer_write_head(self, &arguments, &at);
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

void writer_abort_open(WriterObject *self) {
    while (self->open != NULL) {
        slot_finish(self->open, false);
    }
}
