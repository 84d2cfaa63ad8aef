/* Batches: many trajectories gathered into arrays that the caller owns.
 *
 * Invariant: every length, dtype and bound is checked before the first byte is copied; while bytes
 * are copied the trajectories' space is held, whatever another thread acknowledges. */
#include "python/batch/pack.h"

#include "python/batch/arrays.h"
#include "python/batch/extra_fields.h"
#include "python/batch/field_lookup.h"

struct destination {
    int64_t *tokens;
    int64_t *positions;
    uint8_t *mask;
    float *logprobs;
    float *advantages;
    int32_t *offsets;
    const float *sequence_advantages;
};

/* Whether all that was copied is finite; checked while it is still in the nearest cache. */
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
                     const struct destination *to, struct extras *extras) {
    int32_t at = 0;
    bool finite = true;
    for (Py_ssize_t i = 0; i < count; i++) {
        to->offsets[i] = at;
        finite = copy_sequence(&sources[i], to, at, to->sequence_advantages[i]) && finite;
        py_extras_copy(extras, i);
        at += (int32_t)sources[i].length;
    }
    to->offsets[count] = at;
    return finite;
}

/* Where the trajectories of another holder begin: almost always all are of one. */
static Py_ssize_t end_of_holder(const struct source *sources, Py_ssize_t from, Py_ssize_t count) {
    Py_ssize_t to = from + 1;
    while (to < count && sources[to].trajectory->holder == sources[from].trajectory->holder) {
        to++;
    }
    return to;
}

static void let_go_all(const struct source *sources, const struct record_ref *refs,
                       Py_ssize_t count) {
    for (Py_ssize_t i = 0, end; i < count; i = end) {
        HolderObject *holder = sources[i].trajectory->holder;
        end = end_of_holder(sources, i, count);
        if (holder->attached) {
            holder->kind->let_go(holder, &refs[i], end - i);
        }
    }
}

static bool hold_all(const struct source *sources, const struct record_ref *refs,
                     Py_ssize_t count) {
    for (Py_ssize_t i = 0, end; i < count; i = end) {
        HolderObject *holder = sources[i].trajectory->holder;
        end = end_of_holder(sources, i, count);
        if (!holder->kind->hold(holder, &refs[i], end - i)) {
            let_go_all(sources, refs, i);
            return false;
        }
    }
    return true;
}

/* Where everything goes, after the checks of every array; false with an exception. */
static bool read_destination(PyObject *const *arrays, uint64_t total, uint64_t count,
                             struct destination *to) {
    return py_check_array(arrays[0], "tokens", NPY_INT64, total, true, &to->tokens) &&
           py_check_array(arrays[1], "position_ids", NPY_INT64, total, true, &to->positions) &&
           py_check_array(arrays[2], "loss_mask", NPY_BOOL, total, true, &to->mask) &&
           py_check_array(arrays[3], "logprobs", NPY_FLOAT32, total, true, &to->logprobs) &&
           py_check_array(arrays[4], "advantages", NPY_FLOAT32, total, true, &to->advantages) &&
           py_check_array(arrays[5], "cu_seqlens", NPY_INT32, count + 1, true, &to->offsets) &&
           py_check_array(arrays[6], "sequence_advantages", NPY_FLOAT32, count, false,
                          &to->sequence_advantages);
}

/* Where all that is packed lies, of trajectories that are good for it. */
static bool find_all(PyObject *items, PyObject *const *names, struct source *sources,
                     struct record_ref *refs, struct extras *extras, uint64_t *total) {
    struct lookup lookup = {.schema = NULL};
    if (!py_find_sources(&lookup, items, names, sources)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        TrajectoryObject *t = sources[i].trajectory;
        *total += sources[i].length;
        refs[i] = t->ref;
        if (!py_extras_find(extras, i, t, sources[i].length)) {
            return false;
        }
    }
    return py_batch_fits(*total);
}

/* pack(trajectories, names, tokens, position_ids, loss_mask, logprobs, advantages, cu_seqlens,
 * sequence_advantages, extras) -> bool: fills all arrays, in the trajectories' order; whether all
 * logprobs and advantages in them are finite. */
static PyObject *py_pack(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items, *names[FIELDS], *arrays[7], *specs, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!(OOOO)OOOOOOOO!", &PyList_Type, &items, &names[0], &names[1],
                          &names[2], &names[3], &arrays[0], &arrays[1], &arrays[2], &arrays[3],
                          &arrays[4], &arrays[5], &arrays[6], &PyTuple_Type, &specs)) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(items);
    struct source *sources = PyMem_Malloc((size_t)(count + 1) * sizeof *sources);
    struct record_ref *refs = PyMem_Malloc((size_t)(count + 1) * sizeof *refs);
    struct extras extras = {.count = 0};
    if (sources == NULL || refs == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    uint64_t total = 0;
    struct destination to;
    if (!py_extras_read(&extras, specs, count) ||
        !find_all(items, names, sources, refs, &extras, &total) ||
        !read_destination(arrays, total, (uint64_t)count, &to) ||
        !py_extras_read_destination(&extras, specs) ||
        !hold_all(sources, refs, count)) {
        goto end;
    }
    bool finite;
    Py_BEGIN_ALLOW_THREADS
    finite = copy_all(sources, count, &to, &extras);
    Py_END_ALLOW_THREADS
    let_go_all(sources, refs, count);
    result = PyBool_FromLong(finite);
end:
    py_extras_clear(&extras);
    PyMem_Free(sources);
    PyMem_Free(refs);
    return result;
}

/* measure(trajectories, names) -> (tokens of each, fields that one has, fields that one lacks, names
 * of all fields of each schema that was met), after the checks that pack makes. */
static PyObject *py_measure(PyObject *module, PyObject *args) {
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
    struct lookup lookup = {.schema = NULL, .field_names = PyList_New(0)};
    PyObject *lengths = lookup.field_names != NULL &&
                                py_find_sources(&lookup, items, names, sources)
                            ? PyList_New(count)
                            : NULL;
    for (Py_ssize_t i = 0; lengths != NULL && i < count; i++) {
        PyObject *length = PyLong_FromUnsignedLongLong(sources[i].length);
        if (length == NULL) {
            Py_CLEAR(lengths);
        } else {
            PyList_SET_ITEM(lengths, i, length);
        }
    }
    PyMem_Free(sources);
    PyObject *result = lengths == NULL ? NULL
                                       : Py_BuildValue("OiiO", lengths, lookup.has, lookup.lacks,
                                                       lookup.field_names);
    Py_XDECREF(lengths);
    Py_XDECREF(lookup.field_names);
    return result;
}

/* One element of an array that this file has just made. */
#define ELEMENT(array, type, i) (((type *)PyArray_DATA((PyArrayObject *)(array)))[i])

/* describe(trajectories) -> (scores float64 [S], policy_versions int64 [S], instance_ids,
 * newest_policy_versions int64 [S]). */
static PyObject *py_describe(PyObject *module, PyObject *items) {
    (void)module;
    if (!PyList_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "describe: expected a list of trajectories");
        return NULL;
    }
    npy_intp count = PyList_GET_SIZE(items);
    PyObject *scores = PyArray_SimpleNew(1, &count, NPY_FLOAT64);
    PyObject *versions = PyArray_SimpleNew(1, &count, NPY_INT64);
    PyObject *newest = PyArray_SimpleNew(1, &count, NPY_INT64);
    PyObject *ids = PyList_New(count);
    bool good = scores != NULL && versions != NULL && newest != NULL && ids != NULL;
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
        ELEMENT(newest, int64_t, i) = t->policy_version + (int64_t)t->version_span;
        PyList_SET_ITEM(ids, i, Py_NewRef(t->instance_id));
    }
    PyObject *result = good ? PyTuple_Pack(4, scores, versions, ids, newest) : NULL;
    Py_XDECREF(scores);
    Py_XDECREF(versions);
    Py_XDECREF(newest);
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
static PyObject *py_packed_bytes(PyObject *module, PyObject *args) {
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
static PyObject *py_lay_out(PyObject *module, PyObject *args) {
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
    if (!py_check_array(memory, "memory", NPY_UINT8,
                        (uint64_t)PyArray_SIZE((PyArrayObject *)memory),
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
    {"packed_bytes", py_packed_bytes, METH_VARARGS, NULL},
    {"lay_out", py_lay_out, METH_VARARGS, NULL},
    {"describe", py_describe, METH_O, NULL},
    {"pack", py_pack, METH_VARARGS, NULL},
    {"measure", py_measure, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_pack_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0 &&
           PyModule_AddIntConstant(module, "HAS_LOGPROBS", 1 << FIELD_LOGPROBS) == 0;
}
