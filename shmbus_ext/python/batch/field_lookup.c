/* Field addresses of trajectories. */
#define _GNU_SOURCE /* memmem */
#include "python/batch/batch.h"

bool py_field_error(const TrajectoryObject *t, PyObject *name, const char *expected,
                    PyObject *got) {
    if (got != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "trajectory %R[%S] of producer %llu: field %R: expected %s, got %S",
                     t->instance_id, t->index, U64(t->producer_id), name, expected, got);
        Py_DECREF(got);
    }
    return false;
}

const uint8_t py_element_bytes[] = {
    [ELEMENT_BOOL] = 1, [ELEMENT_I8] = 1,  [ELEMENT_U8] = 1,  [ELEMENT_I16] = 2,
    [ELEMENT_U16] = 2,  [ELEMENT_I32] = 4, [ELEMENT_U32] = 4, [ELEMENT_I64] = 8,
    [ELEMENT_U64] = 8,  [ELEMENT_F32] = 4, [ELEMENT_F64] = 8};

bool py_check_tokens(const struct source *source, PyObject *name) {
    const uint64_t *ids = (const uint64_t *)source->data[FIELD_TOKENS];
    uint64_t at = gather_find_beyond_i64(ids, source->length);
    return at == source->length ||
           py_field_error(source->trajectory, name, "ids below 2**63",
                          PyUnicode_FromFormat("%llu at token %llu", U64(ids[at]), U64(at)));
}

static bool has_row_lengths(const SchemaObject *schema) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(schema->names); i++) {
        if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(schema->names, i),
                                             SHMBUS_ROW_LENGTHS) == 0) {
            return true;
        }
    }
    return false;
}

/* Find the names in a schema and check its dtypes for packing. */
static bool look_up(struct lookup *lookup, TrajectoryObject *t, PyObject *const *names) {
    lookup->schema = NULL;
    lookup->rows = lookup->rows || has_row_lengths(t->schema);
    for (int f = 0; f < FIELDS; f++) {
        int at = names[f] == Py_None ? -1 : py_schema_find(t->schema, names[f]);
        lookup->shape_at[f] = NO_FIELD;
        *(at < 0 ? &lookup->lacks : &lookup->has) |= (uint8_t)(1u << f);
        if (at < 0) {
            if (f == FIELD_TOKENS) {
                return py_field_error(t, names[f], "an integer array of one dimension",
                                   PyUnicode_FromFormat(
                                       "none among %R; put it, or say its name by fields=",
                                       t->schema->names));
            }
            continue;
        }
        if (py_schema_dtype(t->schema, at) == NULL) {
            return false;
        }
        uint8_t kind = lookup->kinds[f] = t->schema->kinds[at];
        bool numeric = f == FIELD_TOKENS ? kind <= ELEMENT_U64
                       : f == FIELD_MASK ? kind <= ELEMENT_F64
                                         : kind == ELEMENT_F32 || kind == ELEMENT_F64;
        if (!numeric) {
            return py_field_error(t, names[f],
                               f == FIELD_TOKENS ? "an integer dtype"
                               : f == FIELD_MASK ? "a boolean or numeric dtype, no half precision"
                                                 : "float32 or float64",
                               py_dtype_text(t->schema->dtypes[at]));
        }
        if (t->schema->ndim[at] != 1) {
            return py_field_error(t, names[f], "one dimension",
                               PyLong_FromLong(t->schema->ndim[at]));
        }
        lookup->shape_at[f] = t->schema->shape_at[at];
    }
    lookup->to_check = lookup->kinds[FIELD_TOKENS] == ELEMENT_U64;
    if (PyList_Append(lookup->field_names, t->schema->names) < 0) {
        return false;
    }
    lookup->schema = t->schema;
    return true;
}

bool py_length_error(const struct source *source, uint64_t length, PyObject *name) {
    return py_field_error(
        source->trajectory, name, "as many elements as tokens",
        PyUnicode_FromFormat("%llu, tokens has %llu", U64(length), U64(source->length)));
}

bool py_look_closer(struct lookup *lookup, PyObject *item, PyObject *const *names) {
    TrajectoryObject *t = py_as_trajectory(item);
    if (t == NULL) {
        return false;
    }
    /* Python code makes a dtype at its first use and may drop references. */
    Py_INCREF(t);
    bool good = py_trajectory_readable(t) &&
                (lookup->schema == t->schema ||
                 (look_up(lookup, t, names) && py_trajectory_readable(t)));
    if (good && lookup->holder != t->holder) {
        py_holder_note_packing(t->holder);
    }
    lookup->holder = good ? t->holder : NULL;
    Py_DECREF(t);
    return good;
}

void py_prefetch_trajectory(const PyObject *item) {
    for (size_t at = 0; at < offsetof(TrajectoryObject, pin); at += SHMBUS_RECORD_ALIGN) {
        __builtin_prefetch((const char *)item + at);
    }
}

/* mapping_of(trajectory) -> (address, bytes, owning segment) of the trajectory's mapping. */
static PyObject *py_mapping_of(PyObject *Py_UNUSED(module), PyObject *item) {
    NEVER(!Py_IS_TYPE(item, &TrajectoryType), NULL);
    SegmentObject *segment = ((TrajectoryObject *)item)->holder->segment;
    return Py_BuildValue("KKO", U64((uintptr_t)segment->c.base), U64(segment->c.bytes),
                         (PyObject *)segment);
}

/* ---- Search for words in the encoded meta of trajectories, without decoding. Separate from the
 * field lookup because no schema describes the meta's bytes.
 *
 * Invariant: only readable trajectories are searched; nothing copied or held. */

static bool mentions(const TrajectoryObject *t, PyObject *words) {
    const uint8_t *meta = NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(words); i++) {
        PyObject *word = PyTuple_GET_ITEM(words, i);
        if ((size_t)t->meta_bytes < (size_t)PyBytes_GET_SIZE(word)) {
            continue;
        }
        meta = meta == NULL ? py_trajectory_bytes(t) + t->meta_offset : meta;
        if (memmem(meta, t->meta_bytes, PyBytes_AS_STRING(word),
                   (size_t)PyBytes_GET_SIZE(word)) != NULL) {
            return true;
        }
    }
    return false;
}

static bool check_words(PyObject *words) {
    bool good = PyTuple_Check(words);
    for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(words); i++) {
        good = PyBytes_Check(PyTuple_GET_ITEM(words, i));
    }
    if (!good) {
        PyErr_Format(PyExc_TypeError, "words: expected a tuple of bytes, got %R", words);
    }
    return good;
}

/* mentioning(trajectories, words) -> positions of the trajectories whose encoded meta contains a
 * word. */
static PyObject *py_mentioning(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *items, *words;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &items, &words) || !check_words(words)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(items); i++) {
        const TrajectoryObject *t = py_as_trajectory(PyList_GET_ITEM(items, i));
        if (t == NULL || (t->meta_bytes > 0 && !py_trajectory_readable(t))) {
            Py_CLEAR(found);
        } else if (t->meta_bytes > 0 && mentions(t, words)) {
            py_list_add(&found, PyLong_FromSsize_t(i));
        }
    }
    return found;
}

/* ---- Arrays of the caller. */
uint64_t py_array_elements(PyObject *object) {
    return PyArray_Check(object) ? (uint64_t)PyArray_SIZE((PyArrayObject *)object) : 0;
}

bool py_check_array(PyObject *object, const char *name, int type, uint64_t length, bool writeable,
                    void *data) {
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_NDIM(array) != 1 || PyArray_TYPE(array) != type ||
        !PyArray_IS_C_CONTIGUOUS(array) || (uint64_t)PyArray_SIZE(array) != length ||
        (writeable && !PyArray_ISWRITEABLE(array))) {
        PyArray_Descr *dtype = PyArray_DescrFromType(type);
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a contiguous%s array of dtype %R with %llu elements, got %R",
                     name, writeable ? " writable" : "", dtype, U64(length),
                     PyArray_Check(object) ? (PyObject *)PyArray_DESCR(array) : object);
        Py_XDECREF(dtype);
        return false;
    }
    *(void **)data = PyArray_DATA(array);
    return true;
}

/* ---- Checks before a copy of a plan. */
bool py_plan_check(const PackPlanObject *self) {
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (!py_trajectory_readable(self->sources[i].trajectory)) {
            return false;
        }
    }
    if (self->total > INT32_MAX) {
        return py_refuse(PyExc_ValueError,
                         "a batch of %llu tokens is more than int32 cu_seqlens can index; lower "
                         "tokens_per_batch",
                         U64(self->total));
    }
    return true;
}

bool py_plan_read_samples(const PackPlanObject *self, PyObject *advantages, PyObject *flags,
                          const float **gains, const uint8_t **flags_at) {
    const uint64_t count = (uint64_t)self->count;
    *flags_at = NULL;
    return py_check_array(advantages, "advantages", NPY_FLOAT32, count, false, gains) &&
           (flags == Py_None ||
            py_check_array(flags, "flags", NPY_UINT8, count, false, flags_at));
}

PyMethodDef py_arrays_functions[] = {
    {"mapping_of", py_mapping_of, METH_O, NULL},
    {"mentioning", py_mentioning, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
