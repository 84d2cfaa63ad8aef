/* Batches: the trajectories of many groups gathered into one block of memory.
 *
 * Invariant: every length, dtype and bound is checked before the first byte is copied. The copy
 * holds the trajectories' space, whatever another thread acknowledges. */
#include "python/batch/batch.h"

#include "python/group/group.h"

/* ---- Destination of a batch ---- */

/* The arrays of a packed batch within one block; both ends of a column lie on a cache line. */
enum { TOKENS, POSITIONS, MASK, LOGPROBS, ADVANTAGES, BORDERS, COLUMNS };
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

/* packed_bytes(total, sequences) -> int: bytes that pack needs for `total` tokens. */
static PyObject *py_packed_bytes(PyObject *Py_UNUSED(module), PyObject *args) {
    struct column columns[COLUMNS];
    unsigned int total, sequences;
    if (!PyArg_ParseTuple(args, "II", &total, &sequences)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(plan_columns(columns, total, sequences));
}

/* The memory, or the first block of a list with enough room and no other reference: borrowed. NULL
 * without an exception if the list lacks such a block. */
static PyObject *choose_memory(PyObject *memory, uint64_t bytes) {
    if (!PyList_Check(memory)) {
        uint8_t *data;
        uint64_t room = py_array_elements(memory);
        if (room < bytes) {
            return PyErr_Format(PyExc_ValueError, "memory: expected uint8 [%llu] or more, got %R",
                                U64(bytes), memory);
        }
        return py_check_array(memory, "memory", NPY_UINT8, room, true, &data) ? memory : NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(memory); i++) {
        PyObject *block = PyList_GET_ITEM(memory, i);
        uint8_t *data;
        uint64_t room = py_array_elements(block);
        if (Py_REFCNT(block) == 1 && room >= bytes) {
            return py_check_array(block, "memory", NPY_UINT8, room, true, &data) ? block : NULL;
        }
    }
    return NULL;
}

/* Put an array per column into the first places of the tuple; the arrays keep the memory alive. */
static bool lay_out(PyObject *arrays, PyObject *memory, const struct column *columns) {
    uint8_t *data = PyArray_DATA((PyArrayObject *)memory);
    for (int i = 0; i < COLUMNS; i++) {
        npy_intp length = (npy_intp)columns[i].length;
        PyObject *array =
            PyArray_SimpleNewFromData(1, &length, columns[i].type, data + columns[i].at);
        if (array == NULL) {
            return false;
        }
        PyTuple_SET_ITEM(arrays, i, array);
        if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(memory)) < 0) {
            return false;
        }
    }
    return true;
}

/* ---- Contents of a batch ---- */

struct batch {
    PyObject *items, *sizes; /* trajectories of every group, and their number per group */
    PyObject *samples, *ids;
    struct source *sources;
    struct record_ref *refs;
    const float *gains; /* the caller's */
    struct extras extras;
    Py_ssize_t count;
    uint64_t total, longest;
    uint8_t has;  /* a bit per field present in a sample */
    bool mixed;   /* only a part of a group or of the batch has a field required of every sample */
    bool rows, metas;
    struct column columns[COLUMNS];
};

/* Rows of the sample table. */
enum { SAMPLE_SCORE, SAMPLE_VERSION, SAMPLE_NEWEST, SAMPLE_TOKENS, SAMPLE_FACTS };

static bool begin_batch(struct batch *self, PyObject *groups, PyObject *specs) {
    self->items = py_group_members(groups, &self->sizes);
    if (self->items == NULL) {
        return false;
    }
    self->count = PyList_GET_SIZE(self->items);
    npy_intp shape[2] = {SAMPLE_FACTS, self->count};
    size_t room = (size_t)self->count + 1;
    self->samples = PyArray_SimpleNew(2, shape, NPY_INT64);
    self->ids = PyList_New(self->count);
    self->sources = PyMem_Malloc(room * sizeof *self->sources);
    self->refs = PyMem_Malloc(room * sizeof *self->refs);
    if (self->samples == NULL || self->ids == NULL) {
        return false;
    }
    if (self->sources == NULL || self->refs == NULL) {
        PyErr_NoMemory();
        return false;
    }
    return py_extras_read(&self->extras, specs, self->count);
}

static void end_batch(struct batch *self) {
    py_extras_clear(&self->extras);
    PyMem_Free(self->sources);
    PyMem_Free(self->refs);
    Py_XDECREF(self->items);
    Py_XDECREF(self->sizes);
    Py_XDECREF(self->samples);
    Py_XDECREF(self->ids);
}

static uint8_t fields_of(const struct source *source) {
    uint8_t has = 0;
    for (int f = 0; f < FIELDS; f++) {
        has |= (uint8_t)((source->data[f] != NULL) << f);
    }
    return has;
}

static void describe(struct batch *self, Py_ssize_t i) {
    const TrajectoryObject *t = self->sources[i].trajectory;
    int64_t *facts = (int64_t *)PyArray_DATA((PyArrayObject *)self->samples) + i;
    const int64_t values[SAMPLE_FACTS] = {
        [SAMPLE_VERSION] = t->policy_version,
        [SAMPLE_NEWEST] = t->policy_version + (int64_t)t->version_span,
        [SAMPLE_TOKENS] = (int64_t)self->sources[i].length,
    };
    for (int row = 0; row < SAMPLE_FACTS; row++) {
        facts[row * self->count] = values[row];
    }
    memcpy(&facts[SAMPLE_SCORE * self->count], &t->score, sizeof t->score);
    PyList_SET_ITEM(self->ids, i, Py_NewRef(t->instance_id));
}

/* Find and describe the sources of a batch; refuse trajectories unfit for packing. */
static bool find_all(struct batch *self, PyObject *const *names) {
    struct lookup lookup = {.schema = NULL};
    if (!py_find_sources(&lookup, self->items, names, self->sources)) {
        return false;
    }
    const int64_t *sizes = PyArray_DATA((PyArrayObject *)self->sizes);
    uint8_t all_have = UINT8_MAX;
    for (Py_ssize_t i = 0, group = 0, end = 0; i < self->count; i++) {
        const struct source *source = &self->sources[i];
        uint8_t has = fields_of(source);
        if (i == end) {
            while (sizes[group] == 0) {
                group++;
            }
            end += (Py_ssize_t)sizes[group++];
        } else {
            self->mixed |= has != fields_of(source - 1);
        }
        self->has |= has;
        all_have &= has;
        self->refs[i] = source->trajectory->ref;
        self->total += source->length;
        self->longest = source->length > self->longest ? source->length : self->longest;
        self->metas |= source->trajectory->meta_bytes > 0;
        describe(self, i);
        if (!py_extras_find(&self->extras, i, source->trajectory, source->length)) {
            return false;
        }
    }
    self->mixed |= ((self->has & ~all_have) >> FIELD_LOGPROBS & 1) != 0;
    self->rows = lookup.rows;
    return py_batch_fits(self->total);
}

/* ---- Holding the space during the copy ---- */

/* First trajectory of the next holder: almost always the end, since batches have one holder. */
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

/* ---- Packing ---- */

/* Copy everything into the memory; 1 if logprobs and advantages are finite, else 0; -1 on error. */
static int copy_all(struct batch *self, PyObject *memory, PyObject *threads) {
    uint8_t *data = PyArray_DATA((PyArrayObject *)memory);
    const struct column *columns = self->columns;
    int32_t *borders = (int32_t *)(data + columns[BORDERS].at);
    struct copy_job job = {
        .sources = self->sources,
        .extras = &self->extras,
        .gains = self->gains,
        .borders = borders,
        .tokens = (int64_t *)(data + columns[TOKENS].at),
        .positions = (int64_t *)(data + columns[POSITIONS].at),
        .mask = data + columns[MASK].at,
        .logprobs = (float *)(data + columns[LOGPROBS].at),
        .advantages = (float *)(data + columns[ADVANTAGES].at),
    };
    borders[0] = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        borders[i + 1] = borders[i] + (int32_t)self->sources[i].length;
    }
    int finite = -1;
    struct threads *helpers;
    if (!py_copy_job_cut(&job, self->count, self->total) ||
        !py_gather_threads_begin(threads, &helpers)) {
        goto end;
    }
    if (hold_all(self->sources, self->refs, self->count)) {
        Py_BEGIN_ALLOW_THREADS
        finite = py_copy_job_run(&job, helpers);
        Py_END_ALLOW_THREADS
        let_go_all(self->sources, self->refs, self->count);
    }
    py_gather_threads_finish(threads);
end:
    py_copy_job_clear(&job);
    return finite;
}

/* The parts of `shmbus.batch.gather.PackedBatch`, in its order. */
static PyObject *make_result(struct batch *self, PyObject *memory, bool finite) {
    enum { SAMPLES = COLUMNS, SIZES, IDS, TRAJECTORIES, TOTAL, LONGEST, HAS_LOGPROBS, HAS_ROWS,
           HAS_METAS, FINITE, PARTS };
    PyObject *result = PyTuple_New(PARTS);
    if (result == NULL) {
        return NULL;
    }
    PyTuple_SET_ITEM(result, SAMPLES, Py_NewRef(self->samples));
    PyTuple_SET_ITEM(result, SIZES, Py_NewRef(self->sizes));
    PyTuple_SET_ITEM(result, IDS, Py_NewRef(self->ids));
    PyTuple_SET_ITEM(result, TRAJECTORIES, Py_NewRef(self->items));
    PyTuple_SET_ITEM(result, TOTAL, PyLong_FromUnsignedLongLong(self->total));
    PyTuple_SET_ITEM(result, LONGEST, PyLong_FromUnsignedLongLong(self->longest));
    PyTuple_SET_ITEM(result, HAS_LOGPROBS, PyBool_FromLong(self->has >> FIELD_LOGPROBS & 1));
    PyTuple_SET_ITEM(result, HAS_ROWS, PyBool_FromLong(self->rows));
    PyTuple_SET_ITEM(result, HAS_METAS, PyBool_FromLong(self->metas));
    PyTuple_SET_ITEM(result, FINITE, PyBool_FromLong(finite));
    if (!lay_out(result, memory, self->columns) || PyErr_Occurred() != NULL) {
        Py_CLEAR(result);
    }
    return result;
}

static PyObject *gather(struct batch *self, PyObject *const *names, PyObject *memory,
                        PyObject *advantages, PyObject *specs, PyObject *threads) {
    if (!find_all(self, names) ||
        !py_check_array(advantages, "advantages", NPY_FLOAT32, (uint64_t)self->count, false,
                        &self->gains)) {
        return NULL;
    }
    if (self->mixed) {
        Py_RETURN_NONE;
    }
    uint64_t bytes = plan_columns(self->columns, self->total, (uint64_t)self->count);
    PyObject *block = choose_memory(memory, bytes);
    if (block == NULL) {
        return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(bytes);
    }
    /* Another thread may take the block out of the list during the copy. */
    Py_INCREF(block);
    int finite = py_extras_read_destination(&self->extras, specs)
                     ? copy_all(self, block, threads)
                     : -1;
    PyObject *result = finite < 0 ? NULL : make_result(self, block, finite != 0);
    Py_DECREF(block);
    return result;
}

/* pack(groups, names, memory, advantages, extras, threads) -> PackedBatch's parts; the number of
 * bytes needed if `memory` is a list without a large enough free block; None if samples lack fields
 * of their siblings. */
static PyObject *py_pack(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *groups, *names[FIELDS], *memory, *advantages, *specs, *threads;
    if (!PyArg_ParseTuple(args, "O!(OOOO)OOO!O", &PyList_Type, &groups, &names[0], &names[1],
                          &names[2], &names[3], &memory, &advantages, &PyTuple_Type, &specs,
                          &threads) ||
        !py_gather_threads_check(threads)) {
        return NULL;
    }
    struct batch self = {.extras = {.count = 0}};
    PyObject *result = begin_batch(&self, groups, specs)
                           ? gather(&self, names, memory, advantages, specs, threads)
                           : NULL;
    end_batch(&self);
    return result;
}

PyMethodDef py_pack_functions[] = {
    {"packed_bytes", py_packed_bytes, METH_VARARGS, NULL},
    {"pack", py_pack, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
