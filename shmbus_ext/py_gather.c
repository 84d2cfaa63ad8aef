/* Batches: many trajectories gathered into arrays that the caller owns.
 *
 * Invariant: every length, dtype and bound is checked before the first byte is copied; while bytes
 * are copied the trajectories' space is held, whatever another thread acknowledges. */
#include "py_sources.h"

struct destination {
    int64_t *tokens;
    int64_t *positions;
    uint8_t *mask;
    float *logprobs;
    float *advantages;
    int32_t *offsets;
    const float *sequence_advantages;
};

/* A field by its name; where it stands in the schema is remembered from one record to the next. */
struct lookup {
    SchemaObject *schema;
    int at[FIELDS];
};

static bool look_up(struct lookup *lookup, TrajectoryObject *t, PyObject *const *names) {
    if (lookup->schema == t->schema) {
        return true;
    }
    for (int f = 0; f < FIELDS; f++) {
        lookup->at[f] = names[f] == Py_None ? -1 : schema_find(t->schema, names[f]);
        if (lookup->at[f] >= 0 && schema_dtype(t->schema, lookup->at[f]) == NULL) {
            return false;
        }
    }
    lookup->schema = t->schema;
    return true;
}

static bool field_error(const TrajectoryObject *t, PyObject *name, const char *expected,
                        PyObject *got) {
    if (got != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "trajectory %R[%S] of producer %llu: field %R: expected %s, got %S",
                     t->instance_id, t->index, (unsigned long long)t->producer_id, name, expected,
                     got);
        Py_DECREF(got);
    }
    return false;
}

/* A batch's tokens are int64. */
static bool check_range(const struct source *source, PyObject *name) {
    const uint64_t *ids = (const uint64_t *)source->data[FIELD_TOKENS];
    uint64_t at = gather_find_beyond_i64(ids, source->length);
    return at == source->length ||
           field_error(source->trajectory, name, "ids below 2**63",
                       PyUnicode_FromFormat("%llu at token %llu", (unsigned long long)ids[at],
                                            (unsigned long long)at));
}

/* A nan is not 0, so it would count as a token to be trained. */
static bool check_mask(const struct source *source, PyObject *name) {
    const void *mask = source->data[FIELD_MASK];
    uint64_t n = source->length, at = n;
    double found = 0;
    if (source->kinds[FIELD_MASK] == ELEMENT_F32) {
        at = gather_find_not_finite(mask, n);
        found = at < n ? (double)((const float *)mask)[at] : 0;
    } else if (source->kinds[FIELD_MASK] == ELEMENT_F64) {
        at = gather_find_not_finite_f64(mask, n);
        found = at < n ? ((const double *)mask)[at] : 0;
    }
    if (at == n) {
        return true;
    }
    PyObject *value = PyFloat_FromDouble(found);
    PyObject *got = value == NULL ? NULL
                                  : PyUnicode_FromFormat("%S at token %llu", value,
                                                         (unsigned long long)at);
    Py_XDECREF(value);
    return field_error(source->trajectory, name, "finite numbers", got);
}

static bool find_field(struct source *source, const struct lookup *lookup, int f, PyObject *name) {
    TrajectoryObject *t = source->trajectory;
    int at = lookup->at[f];
    source->data[f] = NULL;
    if (at < 0) {
        return f != FIELD_TOKENS ||
               field_error(t, name, "an integer array of one dimension",
                           PyUnicode_FromFormat("none among %R; put it, or say its name by fields=",
                                                t->schema->names));
    }
    const uint64_t *shape = t->shape + t->schema->shape_at[at];
    source->kinds[f] = t->schema->kinds[at];
    bool numeric = f == FIELD_TOKENS ? source->kinds[f] <= ELEMENT_U64
                   : f == FIELD_MASK ? source->kinds[f] <= ELEMENT_F64
                                     : source->kinds[f] == ELEMENT_F32 ||
                                           source->kinds[f] == ELEMENT_F64;
    if (!numeric) {
        return field_error(t, name,
                           f == FIELD_TOKENS ? "an integer dtype"
                           : f == FIELD_MASK ? "a boolean or numeric dtype"
                                             : "float32 or float64",
                           Py_NewRef((PyObject *)t->schema->dtypes[at]));
    }
    if (t->schema->ndim[at] != 1) {
        return field_error(t, name, "one dimension", PyLong_FromLong(t->schema->ndim[at]));
    }
    if (f == FIELD_TOKENS) {
        source->length = shape[1];
    } else if (shape[1] != source->length) {
        return field_error(t, name, "as many elements as tokens",
                           PyUnicode_FromFormat("%llu, tokens has %llu",
                                                (unsigned long long)shape[1],
                                                (unsigned long long)source->length));
    }
    source->data[f] = trajectory_bytes(t) + shape[0];
    if (f == FIELD_MASK) {
        return check_mask(source, name);
    }
    return f != FIELD_TOKENS || source->kinds[f] != ELEMENT_U64 || check_range(source, name);
}

/* Thousands of trajectories are in no near cache, and each is looked at for a moment. */
#define AHEAD 6
static void prefetch_object(const PyObject *object) {
    for (size_t at = 0; at < sizeof(TrajectoryObject); at += SHMBUS_RECORD_ALIGN) {
        __builtin_prefetch((const char *)object + at);
    }
}

bool find_sources(PyObject *items, PyObject *const *names, struct source *sources) {
    struct lookup lookup = {.schema = NULL};
    HolderObject *holder = NULL;
    Py_ssize_t count = PyList_GET_SIZE(items);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (i + AHEAD < count) {
            prefetch_object(PyList_GET_ITEM(items, i + AHEAD));
        }
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                         Py_TYPE(item)->tp_name);
            return false;
        }
        sources[i].trajectory = (TrajectoryObject *)item;
        if (!trajectory_readable(sources[i].trajectory) ||
            !look_up(&lookup, sources[i].trajectory, names)) {
            return false;
        }
        if (sources[i].trajectory->reader != holder) {
            holder = sources[i].trajectory->reader;
            holder_note_gathering(holder);
        }
        for (int f = 0; f < FIELDS; f++) {
            if (!find_field(&sources[i], &lookup, f, names[f])) {
                return false;
            }
        }
    }
    return true;
}

/* Whether all that was copied is finite; looked at while it is still in the nearest cache. */
static bool copy_sequence(const struct source *from, const struct destination *to, int32_t at,
                          float advantage) {
    uint64_t n = from->length;
    bool finite = true;
    gather_i64(to->tokens + at, from->data[FIELD_TOKENS], from->kinds[FIELD_TOKENS], n);
    gather_positions(to->positions + at, n);
    if (from->data[FIELD_MASK] == NULL) {
        memset(to->mask + at, 1, n);
    } else {
        gather_bool(to->mask + at, from->data[FIELD_MASK], from->kinds[FIELD_MASK], n);
    }
    if (from->data[FIELD_LOGPROBS] == NULL) {
        memset(to->logprobs + at, 0, n * sizeof(float));
    } else {
        gather_f32(to->logprobs + at, from->data[FIELD_LOGPROBS], from->kinds[FIELD_LOGPROBS], n);
        if (from->data[FIELD_MASK] != NULL) {
            gather_mask_f32(to->logprobs + at, to->mask + at, n);
        }
        finite = !gather_any_not_finite(to->logprobs + at, n);
    }
    if (from->data[FIELD_ADVANTAGES] == NULL) {
        gather_fill_f32(to->advantages + at, advantage, n);
        return finite && !gather_any_not_finite(&advantage, 1);
    }
    gather_f32(to->advantages + at, from->data[FIELD_ADVANTAGES], from->kinds[FIELD_ADVANTAGES],
               n);
    return finite && !gather_any_not_finite(to->advantages + at, n);
}

static bool copy_all(const struct source *sources, Py_ssize_t count,
                     const struct destination *to) {
    int32_t at = 0;
    bool finite = true;
    for (Py_ssize_t i = 0; i < count; i++) {
        to->offsets[i] = at;
        finite = copy_sequence(&sources[i], to, at, to->sequence_advantages[i]) && finite;
        at += (int32_t)sources[i].length;
    }
    to->offsets[count] = at;
    return finite;
}

uint64_t array_elements(PyObject *object) {
    return PyArray_Check(object) ? (uint64_t)PyArray_SIZE((PyArrayObject *)object) : 0;
}

bool check_array(PyObject *object, const char *name, int type, uint64_t length, bool writeable,
                 void *data) {
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_NDIM(array) != 1 || PyArray_TYPE(array) != type ||
        !PyArray_IS_C_CONTIGUOUS(array) || (uint64_t)PyArray_SIZE(array) != length ||
        (writeable && !PyArray_ISWRITEABLE(array))) {
        PyArray_Descr *dtype = PyArray_DescrFromType(type);
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a contiguous%s array of dtype %R with %llu elements, got %R",
                     name, writeable ? " writable" : "", dtype, (unsigned long long)length,
                     PyArray_Check(object) ? (PyObject *)PyArray_DESCR(array) : object);
        Py_XDECREF(dtype);
        return false;
    }
    *(void **)data = PyArray_DATA(array);
    return true;
}

/* Where the trajectories of another holder begin: almost always all are of one. */
static Py_ssize_t end_of_holder(const struct source *sources, Py_ssize_t from, Py_ssize_t count) {
    Py_ssize_t to = from + 1;
    while (to < count && sources[to].trajectory->reader == sources[from].trajectory->reader) {
        to++;
    }
    return to;
}

static void let_go_all(const struct source *sources, const struct record_ref *refs,
                       Py_ssize_t count) {
    for (Py_ssize_t i = 0, end; i < count; i = end) {
        HolderObject *reader = sources[i].trajectory->reader;
        end = end_of_holder(sources, i, count);
        if (reader->attached) {
            reader->kind->let_go(reader, &refs[i], end - i);
        }
    }
}

static bool hold_all(const struct source *sources, const struct record_ref *refs,
                     Py_ssize_t count) {
    for (Py_ssize_t i = 0, end; i < count; i = end) {
        HolderObject *reader = sources[i].trajectory->reader;
        end = end_of_holder(sources, i, count);
        if (!reader->kind->hold(reader, &refs[i], end - i)) {
            let_go_all(sources, refs, i);
            return false;
        }
    }
    return true;
}

bool batch_fits(uint64_t tokens) {
    if (tokens > INT32_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "a batch of %llu tokens is more than int32 cu_seqlens can index; lower "
                     "tokens_per_batch",
                     (unsigned long long)tokens);
    }
    return tokens <= INT32_MAX;
}

/* pack(trajectories, names, tokens, position_ids, loss_mask, logprobs, advantages, cu_seqlens,
 * sequence_advantages) -> bool: fills all arrays, in the trajectories' order; whether all logprobs
 * and advantages in them are finite. */
static PyObject *gather_pack(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items, *names[FIELDS], *arrays[7];
    if (!PyArg_ParseTuple(args, "O!(OOOO)OOOOOOO", &PyList_Type, &items, &names[0], &names[1],
                          &names[2], &names[3], &arrays[0], &arrays[1], &arrays[2], &arrays[3],
                          &arrays[4], &arrays[5], &arrays[6])) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(items);
    struct source *sources = PyMem_Malloc((size_t)(count + 1) * sizeof *sources);
    struct record_ref *refs = PyMem_Malloc((size_t)(count + 1) * sizeof *refs);
    struct destination to;
    uint64_t total = 0;
    bool finite = true;
    bool good = sources != NULL && refs != NULL;
    if (!good) {
        PyErr_NoMemory();
    }
    good = good && find_sources(items, names, sources);
    for (Py_ssize_t i = 0; good && i < count; i++) {
        total += sources[i].length;
        refs[i] = sources[i].trajectory->ref;
    }
    good = good && batch_fits(total);
    uint64_t n = (uint64_t)count;
    good = good && check_array(arrays[0], "tokens", NPY_INT64, total, true, &to.tokens) &&
           check_array(arrays[1], "position_ids", NPY_INT64, total, true, &to.positions) &&
           check_array(arrays[2], "loss_mask", NPY_BOOL, total, true, &to.mask) &&
           check_array(arrays[3], "logprobs", NPY_FLOAT32, total, true, &to.logprobs) &&
           check_array(arrays[4], "advantages", NPY_FLOAT32, total, true, &to.advantages) &&
           check_array(arrays[5], "cu_seqlens", NPY_INT32, n + 1, true, &to.offsets) &&
           check_array(arrays[6], "sequence_advantages", NPY_FLOAT32, n, false,
                       &to.sequence_advantages);
    good = good && hold_all(sources, refs, count);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        finite = copy_all(sources, count, &to);
        Py_END_ALLOW_THREADS
        let_go_all(sources, refs, count);
    }
    PyMem_Free(sources);
    PyMem_Free(refs);
    return good ? PyBool_FromLong(finite) : NULL;
}

/* measure(trajectories, names) -> list[int]: tokens of each, after the checks that pack makes. */
static PyObject *gather_measure(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items, *names[FIELDS];
    if (!PyArg_ParseTuple(args, "O!(OOOO)", &PyList_Type, &items, &names[0], &names[1], &names[2],
                          &names[3])) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(items);
    struct source *sources = PyMem_Malloc((size_t)(count + 1) * sizeof *sources);
    if (sources == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *lengths = find_sources(items, names, sources) ? PyList_New(count) : NULL;
    for (Py_ssize_t i = 0; lengths != NULL && i < count; i++) {
        PyObject *length = PyLong_FromUnsignedLongLong(sources[i].length);
        if (length == NULL) {
            Py_CLEAR(lengths);
        } else {
            PyList_SET_ITEM(lengths, i, length);
        }
    }
    PyMem_Free(sources);
    return lengths;
}

/* One element of an array that this file has just made. */
#define ELEMENT(array, type, i) (((type *)PyArray_DATA((PyArrayObject *)(array)))[i])

/* describe(trajectories) -> (scores float64 [S], policy_versions int64 [S], instance_ids). */
static PyObject *gather_describe(PyObject *module, PyObject *items) {
    (void)module;
    if (!PyList_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "describe: expected a list of trajectories");
        return NULL;
    }
    npy_intp count = PyList_GET_SIZE(items);
    PyObject *scores = PyArray_SimpleNew(1, &count, NPY_FLOAT64);
    PyObject *versions = PyArray_SimpleNew(1, &count, NPY_INT64);
    PyObject *ids = PyList_New(count);
    bool good = scores != NULL && versions != NULL && ids != NULL;
    for (npy_intp i = 0; good && i < count; i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                         Py_TYPE(item)->tp_name);
            good = false;
            break;
        }
        const TrajectoryObject *t = (const TrajectoryObject *)item;
        ELEMENT(scores, double, i) = t->score;
        ELEMENT(versions, int64_t, i) = t->policy_version;
        PyList_SET_ITEM(ids, i, Py_NewRef(t->instance_id));
    }
    PyObject *result = good ? PyTuple_Pack(3, scores, versions, ids) : NULL;
    Py_XDECREF(scores);
    Py_XDECREF(versions);
    Py_XDECREF(ids);
    return result;
}

/* The arrays of a packed batch within one block, each on a cache line; both ends of a column. */
#define COLUMNS 6
struct column {
    int type;
    uint64_t size, length, at;
};

static uint64_t plan_columns(struct column *columns, uint64_t total, uint64_t sequences) {
    const struct column plan[COLUMNS] = {
        {NPY_INT64, 8, total, 0},   {NPY_INT64, 8, total, 0},   {NPY_BOOL, 1, total, 0},
        {NPY_FLOAT32, 4, total, 0}, {NPY_FLOAT32, 4, total, 0}, {NPY_INT32, 4, sequences + 1, 0}};
    uint64_t at = 0;
    for (int i = 0; i < COLUMNS; i++) {
        columns[i] = plan[i];
        columns[i].at = at;
        at += (plan[i].size * plan[i].length + SHMBUS_RECORD_ALIGN - 1) / SHMBUS_RECORD_ALIGN *
              SHMBUS_RECORD_ALIGN;
    }
    return at;
}

/* packed_bytes(total, sequences) -> int: what lay_out needs. */
static PyObject *gather_packed_bytes(PyObject *module, PyObject *args) {
    (void)module;
    struct column columns[COLUMNS];
    unsigned int total, sequences;
    if (!PyArg_ParseTuple(args, "II", &total, &sequences)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(plan_columns(columns, total, sequences));
}

/* lay_out(memory uint8 [n], total, sequences) -> (tokens, position_ids, loss_mask, logprobs,
 * advantages, cu_seqlens): writable arrays within the memory, which they hold. */
static PyObject *gather_lay_out(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *memory;
    unsigned int total, sequences;
    struct column columns[COLUMNS];
    uint8_t *data;
    if (!PyArg_ParseTuple(args, "OII", &memory, &total, &sequences)) {
        return NULL;
    }
    uint64_t bytes = plan_columns(columns, total, sequences);
    if (!PyArray_Check(memory) || (uint64_t)PyArray_SIZE((PyArrayObject *)memory) < bytes) {
        return PyErr_Format(PyExc_ValueError, "memory: expected uint8 [%llu] or more, got %R",
                            (unsigned long long)bytes, memory);
    }
    if (!check_array(memory, "memory", NPY_UINT8, (uint64_t)PyArray_SIZE((PyArrayObject *)memory),
                     true, &data)) {
        return NULL;
    }
    PyObject *arrays = PyTuple_New(COLUMNS);
    for (int i = 0; arrays != NULL && i < COLUMNS; i++) {
        npy_intp length = (npy_intp)columns[i].length;
        PyObject *array =
            PyArray_SimpleNewFromData(1, &length, columns[i].type, data + columns[i].at);
        if (array == NULL ||
            PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(memory)) < 0) {
            Py_XDECREF(array);
            Py_CLEAR(arrays);
        } else {
            PyTuple_SET_ITEM(arrays, i, array);
        }
    }
    return arrays;
}

static PyMethodDef functions[] = {
    {"packed_bytes", gather_packed_bytes, METH_VARARGS, NULL},
    {"lay_out", gather_lay_out, METH_VARARGS, NULL},
    {"describe", gather_describe, METH_O, NULL},
    {"pack", gather_pack, METH_VARARGS, NULL},
    {"measure", gather_measure, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool gather_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
