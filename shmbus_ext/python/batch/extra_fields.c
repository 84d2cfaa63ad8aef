/* Extra fields of a batch. */
#include "python/batch/batch.h"

/* ---- Specs of the caller ---- */

static bool read_sizes(struct extra *extra, PyObject *sizes) {
    extra->ndim = (int)PyTuple_GET_SIZE(sizes);
    if (extra->ndim > (int)SHMBUS_MAX_NDIM) {
        return py_refuse(PyExc_ValueError,
                         "field %R: expected a row of at most %u dimensions, got %d", extra->name,
                         SHMBUS_MAX_NDIM, extra->ndim);
    }
    for (int d = 0; d < extra->ndim; d++) {
        extra->sizes[d] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(sizes, d));
        if (PyErr_Occurred() != NULL) {
            return false;
        }
    }
    return true;
}

/* A row too large for memory saturates at UINT64_MAX: no array is large enough. */
static void count_row_bytes(struct extra *extra) {
    unsigned long long bytes = U64(PyDataType_ELSIZE(extra->dtype));
    for (int d = 0; d < extra->ndim; d++) {
        if (__builtin_mul_overflow(bytes, extra->sizes[d], &bytes)) {
            bytes = UINT64_MAX;
        }
    }
    extra->row_bytes = bytes;
}

static bool read_spec(struct extra *extra, PyObject *spec) {
    PyObject *dtype = NULL, *sizes = NULL;
    int kind = 0, optional = 0;
    if (!PyArg_ParseTuple(spec, "OipOO!", &extra->name, &kind, &optional, &dtype, &PyTuple_Type,
                          &sizes)) {
        return false;
    }
    NEVER(kind < 0 || kind >= EXTRA_KINDS ||
          (dtype != Py_None && !PyArray_DescrCheck(dtype)), false);
    extra->kind = (enum extra_kind)kind;
    extra->optional = optional != 0;
    if (dtype == Py_None) {
        return true;
    }
    extra->dtype = (PyArray_Descr *)dtype;
    if (!read_sizes(extra, sizes)) {
        return false;
    }
    count_row_bytes(extra);
    return true;
}

bool py_extras_read(struct extras *self, PyObject *specs, Py_ssize_t trajectories) {
    self->count = PyTuple_GET_SIZE(specs);
    if (self->count == 0) {
        return true;
    }
    size_t sources = (size_t)(self->count * trajectories) + 1;
    self->fields = PyMem_Calloc((size_t)self->count, sizeof *self->fields);
    self->sources = PyMem_Calloc(sources, sizeof *self->sources);
    self->keep = PyList_New(0);
    if (self->fields == NULL || self->sources == NULL || self->keep == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t e = 0; e < self->count; e++) {
        if (!read_spec(&self->fields[e], PyTuple_GET_ITEM(specs, e))) {
            return false;
        }
    }
    return PyList_Append(self->keep, specs) == 0;
}

void py_extras_clear(struct extras *self) {
    PyMem_Free(self->fields);
    PyMem_Free(self->sources);
    Py_CLEAR(self->keep);
    self->fields = NULL;
    self->sources = NULL;
}

bool py_extras_read_destination(struct extras *self, PyObject *outs) {
    NEVER(PyTuple_GET_SIZE(outs) != self->count, false);
    for (Py_ssize_t e = 0; e < self->count; e++) {
        struct extra *extra = &self->fields[e];
        if (extra->row_bytes > 0 && extra->rows > (uint64_t)INT64_MAX / extra->row_bytes) {
            return py_refuse(PyExc_ValueError, "field %R: its rows are more than memory can hold",
                             extra->name);
        }
        if (!py_check_array(PyTuple_GET_ITEM(outs, e), "extra", NPY_UINT8,
                            extra->rows * extra->row_bytes, true, &extra->out)) {
            return false;
        }
    }
    return true;
}

/* ---- Fields of a record ---- */

/* Index of the first row size in the record's shape: 1 skips the row count. */
static int row_from(const struct extra *extra) {
    return extra->kind == EXTRA_SEQUENCE ? 0 : 1;
}

/* "uint8 rows of shape (48, 8)"; NULL with an exception. */
static PyObject *describe_rows(PyArray_Descr *dtype, const uint64_t *sizes, int ndim) {
    PyObject *tuple = py_sizes(sizes, ndim), *name = py_dtype_text(dtype);
    PyObject *text = tuple == NULL || name == NULL
                         ? NULL
                         : PyUnicode_FromFormat("%U rows of shape %S", name, tuple);
    Py_XDECREF(tuple);
    Py_XDECREF(name);
    return text;
}

static bool rows_differ(const TrajectoryObject *t, const struct extra *extra, PyArray_Descr *dtype,
                        const uint64_t *sizes, int ndim) {
    PyObject *expected = describe_rows(extra->dtype, extra->sizes, extra->ndim);
    const char *text = expected == NULL ? NULL : PyUnicode_AsUTF8(expected);
    if (text != NULL) {
        py_field_error(t, extra->name, text, describe_rows(dtype, sizes, ndim));
    }
    Py_XDECREF(expected);
    return false;
}

/* Cache facts common to every record of a schema; the row sizes may still differ. */
static bool look_up(struct extras *self, struct extra *extra, const TrajectoryObject *t) {
    SchemaObject *schema = t->schema;
    extra->schema = NULL;
    extra->at = py_schema_find(schema, extra->name);
    if (extra->at >= 0) {
        PyArray_Descr *dtype = py_schema_dtype(schema, extra->at);
        if (dtype == NULL) {
            return false;
        }
        const int ndim = schema->ndim[extra->at] - row_from(extra);
        if (ndim < 0) {
            return py_field_error(t, extra->name, "a dimension that counts its rows",
                                  PyUnicode_FromString("a single number"));
        }
        const uint64_t *sizes = t->shape + schema->shape_at[extra->at] + 1 + row_from(extra);
        if (extra->dtype == NULL) {
            if (PyList_Append(self->keep, (PyObject *)schema) < 0) {
                return false;
            }
            extra->dtype = dtype;
            extra->ndim = ndim;
            memcpy(extra->sizes, sizes, (size_t)ndim * sizeof *sizes);
            count_row_bytes(extra);
        } else if (ndim != extra->ndim || !py_same_dtype(dtype, extra->dtype)) {
            return rows_differ(t, extra, dtype, sizes, ndim);
        }
    } else if (!extra->optional) {
        return py_field_error(t, extra->name, "in every sample, since extra_fields has it",
                              PyUnicode_FromFormat("none among %R; put it, or give it a fill by "
                                                   "ExtraField",
                                                   schema->names));
    }
    extra->schema = schema;
    return true;
}

static bool find_one(struct extras *self, struct extra *extra, const TrajectoryObject *t,
                     uint64_t tokens, struct extra_source *source) {
    if (extra->schema != t->schema && !look_up(self, extra, t)) {
        return false;
    }
    source->before = extra->rows;
    if (extra->at < 0) {
        source->data = NULL;
        source->rows = extra->kind == EXTRA_TOKEN ? tokens : extra->kind == EXTRA_SEQUENCE;
        extra->rows += source->rows;
        return true;
    }
    const uint64_t *shape = t->shape + t->schema->shape_at[extra->at];
    const uint64_t *sizes = shape + 1 + row_from(extra);
    source->data = py_trajectory_bytes(t) + shape[0];
    source->rows = extra->kind == EXTRA_SEQUENCE ? 1 : shape[1];
    if (extra->ndim > 0 &&
        memcmp(sizes, extra->sizes, (size_t)extra->ndim * sizeof *sizes) != 0) {
        return rows_differ(t, extra, extra->dtype, sizes, extra->ndim);
    }
    if (extra->kind == EXTRA_TOKEN && source->rows != tokens) {
        return py_field_error(
            t, extra->name, "as many rows as tokens",
            PyUnicode_FromFormat("%llu, tokens has %llu", U64(source->rows), U64(tokens)));
    }
    extra->rows += source->rows;
    return true;
}

bool py_extras_find(struct extras *self, Py_ssize_t i, TrajectoryObject *t, uint64_t tokens) {
    for (Py_ssize_t e = 0; e < self->count; e++) {
        if (!find_one(self, &self->fields[e], t, tokens, &self->sources[i * self->count + e])) {
            return false;
        }
    }
    return true;
}

/* ---- Copying ---- */

void py_extras_copy(const struct extras *self, Py_ssize_t i, uint64_t from, uint64_t n) {
    for (Py_ssize_t e = 0; e < self->count; e++) {
        const struct extra *extra = &self->fields[e];
        const struct extra_source *source = &self->sources[i * self->count + e];
        const bool by_token = extra->kind == EXTRA_TOKEN;
        const uint64_t first = by_token ? from : 0;
        const uint64_t rows = by_token ? n : from == 0 ? source->rows : 0;
        uint8_t *to = extra->out + (source->before + first) * extra->row_bytes;
        const size_t bytes = (size_t)(rows * extra->row_bytes);
        if (source->data == NULL) {
            memset(to, 0, bytes);
        } else {
            memcpy(to, source->data + first * extra->row_bytes, bytes);
        }
    }
}

/* ---- For PackPlan ---- */

static PyObject *describe_extra(const struct extras *self, Py_ssize_t e, npy_intp trajectories) {
    const struct extra *extra = &self->fields[e];
    PyObject *rows = PyArray_SimpleNew(1, &trajectories, NPY_INT64);
    PyObject *sizes = py_sizes(extra->sizes, extra->ndim);
    PyObject *dtype = extra->dtype == NULL ? Py_None : (PyObject *)extra->dtype;
    if (rows != NULL) {
        int64_t *of = PyArray_DATA((PyArrayObject *)rows);
        for (npy_intp i = 0; i < trajectories; i++) {
            const struct extra_source *source = &self->sources[i * self->count + e];
            of[i] = source->data == NULL ? -1 : (int64_t)source->rows;
        }
    }
    PyObject *result =
        rows == NULL || sizes == NULL ? NULL : PyTuple_Pack(3, dtype, sizes, rows);
    Py_XDECREF(rows);
    Py_XDECREF(sizes);
    return result;
}

PyObject *py_extras_describe(const struct extras *self, Py_ssize_t trajectories) {
    PyObject *result = PyList_New(self->count);
    for (Py_ssize_t e = 0; result != NULL && e < self->count; e++) {
        py_list_set(&result, e, describe_extra(self, e, trajectories));
    }
    return result;
}

struct copy_plan {
    int64_t *chunks; /* room for `room` chunks; chunks beyond are counted only */
    uint64_t room, done;
    int64_t shift;
    uint64_t chunk_bytes;
};

static void plan_copy(struct copy_plan *plan, const struct extra *extra,
                      const struct extra_source *source, uint64_t place, uint64_t width) {
    const uint64_t bytes = source->data == NULL ? 0 : source->rows * extra->row_bytes;
    for (uint64_t from = 0; from < bytes; from += plan->chunk_bytes) {
        const uint64_t left = bytes - from;
        if (plan->done < plan->room) {
            int64_t *chunk = plan->chunks + plan->done * COPY_WORDS;
            chunk[COPY_ADDRESS] = (int64_t)(uintptr_t)(source->data + from) + plan->shift;
            chunk[COPY_AT] = (int64_t)((place + from) / width);
            chunk[COPY_WORDS_THERE] =
                (int64_t)((left < plan->chunk_bytes ? left : plan->chunk_bytes) / width);
            chunk[COPY_RESERVED] = 0;
        }
        plan->done++;
    }
}

/* Plan the chunks of one field, whose memory begins at `place`. */
static PyObject *plan_field(struct copy_plan *plan, const struct extras *extras, Py_ssize_t e,
                            Py_ssize_t count, uint64_t place, uint64_t width) {
    const struct extra *extra = &extras->fields[e];
    const uint64_t first = plan->done;
    NEVER(width == 0 || extra->row_bytes % width != 0 || place % width != 0, NULL);
    for (Py_ssize_t i = 0; i < count; i++) {
        const struct extra_source *source = &extras->sources[i * extras->count + e];
        plan_copy(plan, extra, source, place, width);
        place += source->rows * extra->row_bytes;
    }
    return Py_BuildValue("KK", U64(first), U64(plan->done - first));
}

/* copy_table(places, memory int64 [n], shift, chunk_bytes) -> (chunks, [(first chunk, chunks) per
 * field]): a kernel's copy of every extra field to its place; places: (first byte, bytes per
 * word). */
PyObject *py_plan_copy_table(PackPlanObject *self, PyObject *args) {
    PyObject *places, *memory, *launches;
    long long shift;
    unsigned long long chunk_bytes;
    if (!PyArg_ParseTuple(args, "O!OLK", &PyTuple_Type, &places, &memory, &shift, &chunk_bytes)) {
        return NULL;
    }
    struct copy_plan plan = {.shift = shift, .chunk_bytes = chunk_bytes};
    const uint64_t words = py_array_elements(memory);
    NEVER(chunk_bytes == 0 || PyTuple_GET_SIZE(places) != self->extras.count, NULL);
    if (!py_plan_check(self) ||
        !py_check_array(memory, "memory", NPY_INT64, words, true, &plan.chunks)) {
        return NULL;
    }
    plan.room = words / COPY_WORDS;
    launches = PyList_New(self->extras.count);
    for (Py_ssize_t e = 0; launches != NULL && e < self->extras.count; e++) {
        unsigned long long place, width;
        py_list_set(&launches, e,
                    PyArg_ParseTuple(PyTuple_GET_ITEM(places, e), "KK", &place, &width)
                        ? plan_field(&plan, &self->extras, e, self->count, place, width)
                        : NULL);
    }
    return launches == NULL ? NULL : Py_BuildValue("KN", U64(plan.done), launches);
}
