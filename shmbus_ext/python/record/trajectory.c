/* Trajectory: one record, on the consumer's side.
 *
 * Invariants: a trajectory holds its record's space until released; every array handed out holds
 * the pin, so the space outlives the release until the last array is gone. Only a release gives
 * space back: the record of a trajectory destroyed earlier stays committed, and its Reader holds
 * the record for the next reader. Arrays are permanently read-only: the pin exports no buffer, and
 * their memory is mapped read-only. The last part of this file contains the methods over whole
 * records. */
#include "python/record/record.h"

#include "base/checksum.h"
#include "public_docs.h"
#include "python/hooks.h"

TrajectoryObject *py_as_trajectory(PyObject *item) {
    if (!Py_IS_TYPE(item, &TrajectoryType)) {
        PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s", Py_TYPE(item)->tp_name);
        return NULL;
    }
    return (TrajectoryObject *)item;
}

PyObject *py_sizes(const uint64_t *sizes, int ndim) {
    PyObject *tuple = PyTuple_New(ndim);
    for (int d = 0; tuple != NULL && d < ndim; d++) {
        py_tuple_set(&tuple, d, PyLong_FromUnsignedLongLong(sizes[d]));
    }
    return tuple;
}

PyObject *py_array_over(PyArray_Descr *dtype, int ndim, const uint64_t *sizes, void *data,
                        int flags, PyObject *base) {
    npy_intp dims[SHMBUS_MAX_NDIM];
    for (int d = 0; d < ndim; d++) {
        dims[d] = (npy_intp)sizes[d];
    }
    Py_INCREF(dtype);
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, dtype, ndim, dims, NULL, data, flags, NULL);
    if (array != NULL && base != NULL &&
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(base)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

static PyObject *shared_id(HolderObject *holder, const char *text, uint32_t bytes, uint32_t hash) {
    PyObject **place = &holder->ids[hash % ID_TABLE];
    if (*place != NULL) {
        Py_ssize_t length;
        const char *known = PyUnicode_AsUTF8AndSize(*place, &length);
        if (known != NULL && length == (Py_ssize_t)bytes && memcmp(known, text, bytes) == 0) {
            return Py_NewRef(*place);
        }
    }
    PyObject *id = PyUnicode_DecodeUTF8(text, (Py_ssize_t)bytes, "replace");
    if (id != NULL) {
        Py_XSETREF(*place, Py_NewRef(id));
    }
    return id;
}

static SchemaObject *shared_schema(HolderObject *holder, const struct record_copy *copy) {
    uint32_t bytes = copy->header.schema_bytes;
    SchemaObject *last = holder->last_schema;
    if (last != NULL && (uint32_t)PyBytes_GET_SIZE(last->encoded) == bytes &&
        last->count == copy->header.field_count &&
        memcmp(PyBytes_AS_STRING(last->encoded), copy->schema, bytes) == 0) {
        return (SchemaObject *)Py_NewRef((PyObject *)last);
    }
    SchemaObject *fresh = py_schema_parse(copy->schema, bytes, copy->header.field_count);
    if (fresh == NULL) {
        return NULL;
    }
    SchemaObject *known = (SchemaObject *)PyDict_GetItemWithError(holder->schemas, fresh->encoded);
    if (known != NULL) {
        Py_INCREF(known);
        Py_SETREF(fresh, known);
    } else {
        /* Hostile producers could invent new schemas for ever. */
        if (PyDict_GET_SIZE(holder->schemas) > 1024) {
            PyDict_Clear(holder->schemas);
        }
        if (PyErr_Occurred() ||
            PyDict_SetItem(holder->schemas, fresh->encoded, (PyObject *)fresh) < 0) {
            Py_DECREF(fresh);
            return NULL;
        }
    }
    Py_XSETREF(holder->last_schema, (SchemaObject *)Py_NewRef((PyObject *)fresh));
    return fresh;
}

PyObject *py_make_key(PyObject *instance_id, int64_t round, uint32_t split) {
    if (split != SHMBUS_SPLIT_TRAIN) {
        return round == SHMBUS_NO_ROUND
                   ? Py_BuildValue("(OOi)", instance_id, Py_None, (int)split)
                   : Py_BuildValue("(OLi)", instance_id, (long long)round, (int)split);
    }
    return round == SHMBUS_NO_ROUND ? Py_NewRef(instance_id)
                                    : Py_BuildValue("(OL)", instance_id, (long long)round);
}

TrajectoryObject *py_trajectory_new(HolderObject *holder, const struct record_copy *copy,
                                    const struct record_ref *ref) {
    const struct record_header *header = &copy->header;
    TrajectoryObject *self = PyObject_New(TrajectoryObject, &TrajectoryType);
    if (self == NULL) {
        return NULL;
    }
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->ref = *ref;
    self->holder = (HolderObject *)Py_NewRef((PyObject *)holder);
    self->score = header->score;
    self->policy_version = header->policy_version;
    self->version_span = header->version_span;
    self->need = header->need;
    self->split = header->split;
    self->round = header->round;
    self->sequence = header->sequence;
    self->producer_id = header->producer_id;
    self->committed_ns = header->committed_ns;
    self->payload_bytes = header->payload_bytes;
    self->meta_offset = header->meta_offset;
    self->meta_bytes = header->meta_bytes;
    self->failed = (header->flags & SHMBUS_FLAG_FAILED) != 0;
    const uint32_t state = RELAXED(header->state);
    self->leased = shmbus_is_leased(state) ? state : 0;
    self->unscored = isnan(header->score) && !self->failed;
    self->shape = self->inline_shape;
    if (header->shape_words > INLINE_SHAPE_WORDS) {
        self->shape = PyMem_Malloc((size_t)header->shape_words * 8);
        if (self->shape == NULL) {
            Py_DECREF(self);
            PyErr_NoMemory();
            return NULL;
        }
    }
    memcpy(self->shape, copy->shape, (size_t)header->shape_words * 8);
    self->schema = shared_schema(holder, copy);
    self->instance_id = shared_id(holder, copy->id, header->id_bytes,
                                  shmbus_crc32c(0, copy->id, header->id_bytes));
    self->index = PyLong_FromUnsignedLong(header->index);
    self->group_size =
        PyLong_FromUnsignedLong(header->flags & SHMBUS_FLAG_NO_SIZE ? 0 : header->group_size);
    if (self->schema == NULL || self->instance_id == NULL || self->index == NULL ||
        self->group_size == NULL ||
        (self->key = py_make_key(self->instance_id, self->round, self->split)) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->held = holder->kind->counts;
    return self;
}

static void py_trajectory_dealloc(TrajectoryObject *self) {
    if (self->held) {
        self->holder->orphans++;
    }
    if (self->pin != NULL) {
        if (self->held) {
            /* Keep its views from freeing the space, too. */
            self->pin->holder = NULL;
        }
        Py_DECREF(self->pin);
    }
    if (self->shape != self->inline_shape) {
        PyMem_Free(self->shape);
    }
    Py_XDECREF(self->schema);
    Py_XDECREF(self->instance_id);
    Py_XDECREF(self->index);
    Py_XDECREF(self->group_size);
    Py_XDECREF(self->key);
    Py_XDECREF(self->meta);
    Py_XDECREF(self->holder);
    PyObject_Free(self);
}

bool py_trajectory_readable(const TrajectoryObject *self) {
    if (self->released) {
        return py_refuse(
            hooks.closed_error,
            "trajectory %R[%S] was acknowledged or dropped, and its space given back to "
            "the ring; take its arrays before that (they stay valid), or copy them",
            self->instance_id, self->index);
    }
    if (!self->holder->attached) {
        return py_refuse(
            hooks.closed_error,
            "trajectory %R[%S]: its Consumer is closed; take its arrays before that (they "
            "stay valid)",
            self->instance_id, self->index);
    }
    return py_segment_usable(self->holder->segment, "Consumer");
}

/* A read-only array of one field of a readable trajectory. */
static PyObject *py_trajectory_view(TrajectoryObject *self, int field) {
    PyArray_Descr *dtype = py_schema_dtype(self->schema, field);
    if (dtype == NULL) {
        return NULL;
    }
    if (self->pin == NULL) {
        self->pin = py_pin_new(self->holder, &self->ref);
        if (self->pin == NULL) {
            return NULL;
        }
    }
    const uint64_t *shape = self->shape + self->schema->shape_at[field];
    const struct segment *segment = &self->holder->segment->c;
    uint8_t *data = segment->view_base + (py_trajectory_bytes(self) - segment->base) + shape[0];
    return py_array_over(dtype, self->schema->ndim[field], shape + 1, data, NPY_ARRAY_CARRAY_RO,
                         (PyObject *)self->pin);
}

/* -1 with an exception for an unknown field. */
static int require_field(const TrajectoryObject *self, PyObject *name) {
    int field = py_schema_find(self->schema, name);
    if (field < 0) {
        PyErr_Format(PyExc_KeyError, "%R: this trajectory has the fields %R", name,
                     self->schema->names);
    }
    return field;
}

static PyObject *py_trajectory_get(TrajectoryObject *self, PyObject *name) {
    int field = require_field(self, name);
    return field >= 0 && py_trajectory_readable(self) ? py_trajectory_view(self, field) : NULL;
}

static PyObject *py_trajectory_get_or(TrajectoryObject *self, PyObject *args) {
    PyObject *name, *otherwise = Py_None;
    if (!PyArg_ParseTuple(args, "O|O", &name, &otherwise)) {
        return NULL;
    }
    int field = py_schema_find(self->schema, name);
    if (field < 0) {
        return Py_NewRef(otherwise);
    }
    return py_trajectory_readable(self) ? py_trajectory_view(self, field) : NULL;
}

static int py_trajectory_contains(TrajectoryObject *self, PyObject *name) {
    return py_schema_find(self->schema, name) >= 0;
}

static Py_ssize_t py_trajectory_length(TrajectoryObject *self) {
    return (Py_ssize_t)self->schema->count;
}

static PyObject *py_trajectory_iter(TrajectoryObject *self) {
    return PyObject_GetIter(self->schema->names);
}

static PyObject *py_trajectory_keys(TrajectoryObject *self, PyObject *Py_UNUSED(ignored)) {
    return Py_NewRef(self->schema->names);
}

/* shape(name) -> tuple; needs no access to the ring. */
static PyObject *py_trajectory_shape(TrajectoryObject *self, PyObject *name) {
    int field = require_field(self, name);
    return field < 0 ? NULL
                     : py_sizes(self->shape + self->schema->shape_at[field] + 1,
                                self->schema->ndim[field]);
}

static PyObject *py_trajectory_meta(TrajectoryObject *self, void *Py_UNUSED(ignored)) {
    if (self->meta == NULL) {
        if (self->meta_bytes == 0) {
            Py_RETURN_NONE;
        }
        if (!py_trajectory_readable(self)) {
            return NULL;
        }
        PyObject *raw = PyBytes_FromStringAndSize(
            (const char *)py_trajectory_bytes(self) + self->meta_offset, self->meta_bytes);
        if (raw == NULL) {
            return NULL;
        }
        self->meta = PyObject_CallOneArg(hooks.decode_meta, raw);
        Py_DECREF(raw);
    }
    return Py_XNewRef(self->meta);
}

static PyObject *py_trajectory_round(TrajectoryObject *self, void *Py_UNUSED(ignored)) {
    return py_round(self->round);
}

static PyObject *py_trajectory_split(TrajectoryObject *self, void *Py_UNUSED(ignored)) {
    return py_split_label(self->holder->segment, self->split);
}

static PyObject *py_trajectory_rows(TrajectoryObject *self, void *Py_UNUSED(ignored)) {
    return py_trajectory_readable(self) ? PyObject_CallOneArg(hooks.rows_of, (PyObject *)self)
                                        : NULL;
}

static PyObject *py_trajectory_newest(TrajectoryObject *self, void *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(self->policy_version + (long long)self->version_span);
}

static PyObject *py_trajectory_repr(TrajectoryObject *self) {
    PyObject *score =
        py_trajectory_has_score(self) ? PyFloat_FromDouble(self->score) : Py_NewRef(Py_None);
    PyObject *text =
        score == NULL ? NULL
                      : PyUnicode_FromFormat(
                            "<Trajectory %R[%S/%S] score=%R policy_version=%lld fields=%R%s>",
                          self->instance_id, self->index, self->group_size, score,
                          (long long)self->policy_version, self->schema->names,
                          self->released ? " released" : "");
    Py_XDECREF(score);
    return text;
}

/* ---- The score of a trajectory: given by its producer or, if left open, set by its reader.
 *
 * Invariant: a set score belongs to one object in one process. The record keeps the producer's
 * value, so after a death the next reader scores the sample anew. */

static PyObject *py_trajectory_get_scored(TrajectoryObject *self, void *Py_UNUSED(ignored)) {
    return PyBool_FromLong(py_trajectory_has_score(self));
}

static bool require_score(const TrajectoryObject *self) {
    if (py_trajectory_has_score(self)) {
        return true;
    }
    return py_refuse(
        hooks.unscored_error,
        "trajectory %R[%S] of producer %llu: expected a score, got none yet: it was put "
        "with score=None; set trajectory.score, or give OnlineDataHandler a score_group, "
        "before it is trained on",
        self->instance_id, self->index, U64(self->producer_id));
}

static PyObject *py_trajectory_get_score(TrajectoryObject *self, void *Py_UNUSED(ignored)) {
    return require_score(self) ? PyFloat_FromDouble(self->score) : NULL;
}

/* Affects this object only: the record keeps its producer's value for the next reader. */
static int py_trajectory_set_score(TrajectoryObject *self, PyObject *value,
                                   void *Py_UNUSED(ignored)) {
    if (!self->unscored) {
        PyErr_Format(PyExc_AttributeError,
                     "trajectory %R[%S]: score: expected one that its producer left open, by "
                     "score=None, got one that it has set; it cannot be changed",
                     self->instance_id, self->index);
        return -1;
    }
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "score cannot be deleted");
        return -1;
    }
    double score = PyFloat_AsDouble(value);
    if (score == -1.0 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "trajectory %R[%S]: score: expected a float, got %.100s",
                         self->instance_id, self->index, Py_TYPE(value)->tp_name);
        }
        return -1;
    }
    if (!isfinite(score)) {
        PyErr_Format(PyExc_ValueError,
                     "trajectory %R[%S]: score: expected a finite number, got %S; drop a group "
                     "that cannot be scored",
                     self->instance_id, self->index, value);
        return -1;
    }
    self->score = score;
    return 0;
}

/* ---- Methods of Trajectory over every field, and copies out of the ring.
 *
 * Invariants: an array to copy is a view with a pin until its copy is made, because another thread
 * may acknowledge the group in between. A copy refers to neither ring nor consumer. */
/* A tuple of `make` applied to every field, in the producer's order. */
static PyObject *each_field(TrajectoryObject *self,
                            PyObject *(*make)(TrajectoryObject *self, int field)) {
    if (!py_trajectory_readable(self)) {
        return NULL;
    }
    PyObject *all = PyTuple_New((Py_ssize_t)self->schema->count);
    for (int field = 0; all != NULL && field < (int)self->schema->count; field++) {
        py_tuple_set(&all, field, make(self, field));
    }
    return all;
}

static PyObject *name_of(const TrajectoryObject *self, int field) {
    return PyTuple_GET_ITEM(self->schema->names, field);
}

static PyObject *make_item(TrajectoryObject *self, int field) {
    PyObject *view = py_trajectory_view(self, field);
    PyObject *item = view == NULL ? NULL : PyTuple_Pack(2, name_of(self, field), view);
    Py_XDECREF(view);
    return item;
}

static PyObject *py_trajectory_items(TrajectoryObject *self, PyObject *Py_UNUSED(ignored)) {
    return each_field(self, make_item);
}

static PyObject *py_trajectory_values(TrajectoryObject *self, PyObject *Py_UNUSED(ignored)) {
    return each_field(self, py_trajectory_view);
}

static PyObject *owned_fields(TrajectoryObject *self) {
    PyObject *fields = PyDict_New();
    for (int field = 0; fields != NULL && field < (int)self->schema->count; field++) {
        PyObject *view = py_trajectory_view(self, field);
        PyObject *own =
            view == NULL ? NULL : PyArray_NewCopy((PyArrayObject *)view, NPY_CORDER);
        Py_XDECREF(view);
        if (own == NULL || PyDict_SetItem(fields, name_of(self, field), own) < 0) {
            Py_CLEAR(fields);
        }
        Py_XDECREF(own);
    }
    return fields;
}

/* The hook takes the arguments of TrajectoryCopy, its meta still encoded. */
static PyObject *py_trajectory_copy(TrajectoryObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_trajectory_readable(self)) {
        return NULL;
    }
    /* Copy before the fields: other threads may run during their copy. */
    PyObject *meta = PyBytes_FromStringAndSize(
        (const char *)py_trajectory_bytes(self) + self->meta_offset, self->meta_bytes);
    PyObject *round = py_round(self->round);
    PyObject *split = py_split_label(self->holder->segment, self->split);
    PyObject *fields =
        meta == NULL || round == NULL || split == NULL ? NULL : owned_fields(self);
    if (fields == NULL) {
        Py_XDECREF(meta);
        Py_XDECREF(round);
        Py_XDECREF(split);
        return NULL;
    }
    PyObject *arguments = Py_BuildValue(
        "(OOOiNNOdLLKKKKNN)", self->instance_id, self->index, self->group_size, (int)self->need,
        round, split, self->key, self->score, (long long)self->policy_version,
        (long long)self->policy_version + (long long)self->version_span, U64(self->producer_id),
        U64(self->sequence), U64(self->committed_ns), U64(self->ref.bytes), meta, fields);
    PyObject *copy = arguments == NULL
                         ? NULL
                         : PyObject_CallOneArg(hooks.copy_trajectory, arguments);
    Py_XDECREF(arguments);
    return copy;
}

static PyObject *py_trajectory_to_dict(TrajectoryObject *self, PyObject *ignored) {
    PyObject *copy = py_trajectory_copy(self, ignored);
    PyObject *dict = copy == NULL ? NULL : PyObject_CallMethod(copy, "to_dict", NULL);
    Py_XDECREF(copy);
    return dict;
}

static PyObject *py_trajectory_reduce(TrajectoryObject *self, PyObject *Py_UNUSED(ignored)) {
    return PyErr_Format(PyExc_TypeError,
                        "trajectory %R[%S] is under lease, and its arrays are views of the ring: "
                        "it cannot be pickled or sent to another process; pickle its .copy(), "
                        "which owns its arrays",
                        self->instance_id, self->index);
}

static PyMethodDef trajectory_methods[] = {
    METHOD("keys", py_trajectory_keys, METH_NOARGS, DOC_Trajectory_keys),
    METHOD("get", py_trajectory_get_or, METH_VARARGS, DOC_Trajectory_get),
    METHOD("shape", py_trajectory_shape, METH_O, DOC_Trajectory_shape),
    METHOD("items", py_trajectory_items, METH_NOARGS, DOC_Trajectory_items),
    METHOD("values", py_trajectory_values, METH_NOARGS, DOC_Trajectory_values),
    METHOD("copy", py_trajectory_copy, METH_NOARGS, DOC_Trajectory_copy),
    METHOD("to_dict", py_trajectory_to_dict, METH_NOARGS, DOC_Trajectory_to_dict),
    METHOD("__reduce__", py_trajectory_reduce, METH_NOARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef trajectory_getset[] = {
    {"meta", (getter)py_trajectory_meta, NULL, DOC_Trajectory_meta, NULL},
    {"round", (getter)py_trajectory_round, NULL, DOC_Trajectory_round, NULL},
    {"split", (getter)py_trajectory_split, NULL, DOC_Trajectory_split, NULL},
    {"rows", (getter)py_trajectory_rows, NULL, DOC_Trajectory_rows, NULL},
    {"newest_policy_version", (getter)py_trajectory_newest, NULL,
     DOC_Trajectory_newest_policy_version, NULL},
    {"score", (getter)py_trajectory_get_score, (setter)py_trajectory_set_score,
     DOC_Trajectory_score, NULL},
    {"scored", (getter)py_trajectory_get_scored, NULL, DOC_Trajectory_scored, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* An attribute named like its struct member. */
#define MEMBER(kind, field) \
    {#field, kind, offsetof(TrajectoryObject, field), READONLY, DOC_Trajectory_##field}

static PyMemberDef trajectory_members[] = {
    MEMBER(T_OBJECT_EX, instance_id),
    MEMBER(T_OBJECT_EX, index),
    MEMBER(T_OBJECT_EX, group_size),
    MEMBER(T_OBJECT_EX, key),
    MEMBER(T_USHORT, need),
    MEMBER(T_LONGLONG, policy_version),
    MEMBER(T_ULONGLONG, sequence),
    MEMBER(T_ULONGLONG, producer_id),
    MEMBER(T_ULONGLONG, committed_ns),
    MEMBER(T_BOOL, released),
    MEMBER(T_BOOL, failed),
    {"nbytes", T_ULONGLONG, offsetof(TrajectoryObject, ref.bytes), READONLY, DOC_Trajectory_nbytes},
    {NULL, 0, 0, 0, NULL},
};

static PySequenceMethods trajectory_sequence = {.sq_contains = (objobjproc)py_trajectory_contains};
static PyMappingMethods trajectory_mapping = {.mp_length = (lenfunc)py_trajectory_length,
                                              .mp_subscript = (binaryfunc)py_trajectory_get};

PyTypeObject TrajectoryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus.Trajectory",
    .tp_basicsize = sizeof(TrajectoryObject),
    .tp_dealloc = (destructor)py_trajectory_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = DOC_Trajectory,
    .tp_methods = trajectory_methods,
    .tp_getset = trajectory_getset,
    .tp_members = trajectory_members,
    .tp_as_sequence = &trajectory_sequence,
    .tp_as_mapping = &trajectory_mapping,
    .tp_iter = (getiterfunc)py_trajectory_iter,
    .tp_repr = (reprfunc)py_trajectory_repr,
};
