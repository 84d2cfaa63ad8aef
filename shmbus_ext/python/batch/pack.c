/* PackPlan: the samples of a batch, measured in one pass, and their copy into memory of the host. */
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
        at = shmbus_align_up(at + plan[i].size * plan[i].length, SHMBUS_RECORD_ALIGN);
    }
    return at;
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

/* ---- Measuring ---- */

/* Thousands of trajectories exceed the near caches, and every trajectory is read only briefly. */
#define AHEAD 6

static bool begin_plan(PackPlanObject *self, PyObject *groups, PyObject *specs) {
    self->trajectories = py_group_members(groups, &self->sizes);
    if (self->trajectories == NULL) {
        return false;
    }
    self->count = PyList_GET_SIZE(self->trajectories);
    npy_intp shape[2] = {SAMPLE_FACTS, self->count};
    size_t room = (size_t)self->count + 1;
    self->samples = PyArray_SimpleNew(2, shape, NPY_INT64);
    self->ids = PyList_New(self->count);
    self->field_names = PyList_New(0);
    self->sources = PyMem_Malloc(room * sizeof *self->sources);
    self->refs = PyMem_Malloc(room * sizeof *self->refs);
    if (self->samples == NULL || self->ids == NULL || self->field_names == NULL) {
        return false;
    }
    if (self->sources == NULL || self->refs == NULL) {
        PyErr_NoMemory();
        return false;
    }
    return py_extras_read(&self->extras, specs, self->count);
}

static void describe(PackPlanObject *self, Py_ssize_t i) {
    const TrajectoryObject *t = self->sources[i].trajectory;
    int64_t *facts = (int64_t *)PyArray_DATA((PyArrayObject *)self->samples) + i;
    const uint64_t length = self->sources[i].length;
    memcpy(&facts[SAMPLE_SCORE * self->count], &t->score, sizeof t->score);
    facts[SAMPLE_VERSION * self->count] = t->policy_version;
    facts[SAMPLE_NEWEST * self->count] = t->policy_version + (int64_t)t->version_span;
    facts[SAMPLE_TOKENS * self->count] = (int64_t)length;
    PyList_SET_ITEM(self->ids, i, Py_NewRef(t->instance_id));
    self->refs[i] = t->ref;
    self->total += length;
    self->longest = length > self->longest ? length : self->longest;
    self->metas |= t->meta_bytes > 0;
    self->scores_fit &= fabs(t->score) <= MAX_SCORE; /* false for a nan */
}

/* Find and describe the sources of every sample; refuse trajectories unfit for packing. */
static bool measure(PackPlanObject *self, PyObject *const *names) {
    struct lookup lookup = {.schema = NULL, .field_names = self->field_names};
    self->scores_fit = true;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (i + AHEAD < self->count) {
            py_prefetch_trajectory(PyList_GET_ITEM(self->trajectories, i + AHEAD));
        }
        struct source *source = &self->sources[i];
        if (!py_find_source(&lookup, PyList_GET_ITEM(self->trajectories, i), names, source) ||
            !py_extras_find(&self->extras, i, source->trajectory, source->length)) {
            return false;
        }
        describe(self, i);
    }
    self->has = lookup.has;
    self->lacks = lookup.lacks;
    self->has_logprobs = lookup.has >> FIELD_LOGPROBS & 1;
    self->rows = lookup.rows;
    struct column columns[COLUMNS];
    self->bytes = plan_columns(columns, self->total, (uint64_t)self->count);
    return true;
}

static void py_plan_dealloc(PackPlanObject *self) {
    py_extras_clear(&self->extras);
    PyMem_Free(self->sources);
    PyMem_Free(self->refs);
    Py_XDECREF(self->trajectories);
    Py_XDECREF(self->sizes);
    Py_XDECREF(self->samples);
    Py_XDECREF(self->ids);
    Py_XDECREF(self->field_names);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* PackPlan(groups, names, specs of extra fields) */
static PyObject *py_plan_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *groups, *names[FIELDS], *specs;
    if (!PyArg_ParseTuple(args, "O!(OOOO)O!", &PyList_Type, &groups, &names[0], &names[1],
                          &names[2], &names[3], &PyTuple_Type, &specs)) {
        return NULL;
    }
    PackPlanObject *self = (PackPlanObject *)type->tp_alloc(type, 0);
    if (self != NULL && (!begin_plan(self, groups, specs) || !measure(self, names))) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* ---- Holding the space during a copy ---- */

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

/* ---- Copying ---- */

/* gather(memory, advantages, flags, outs, threads) -> (arrays of the columns, True if masks hold 0
 * and 1, logprobs and advantages are finite, and logprobs at most 0). */
static PyObject *py_plan_gather(PackPlanObject *self, PyObject *args) {
    PyObject *memory, *advantages, *flags, *outs;
    unsigned int threads;
    struct copy_job job = {.sources = self->sources, .extras = &self->extras};
    uint8_t *data;
    if (!PyArg_ParseTuple(args, "OOOO!I", &memory, &advantages, &flags, &PyTuple_Type, &outs,
                          &threads) ||
        !py_plan_check(self) ||
        !py_plan_read_samples(self, advantages, flags, &job.gains, &job.flags) ||
        !py_extras_read_destination(&self->extras, outs)) {
        return NULL;
    }
    const uint64_t room = py_array_elements(memory);
    if (room < self->bytes) {
        return PyErr_Format(PyExc_ValueError, "memory: expected uint8 [%llu] or more, got %R",
                            U64(self->bytes), memory);
    }
    if (!py_check_array(memory, "memory", NPY_UINT8, room, true, &data)) {
        return NULL;
    }
    struct column columns[COLUMNS];
    plan_columns(columns, self->total, (uint64_t)self->count);
    int32_t *borders = (int32_t *)(data + columns[BORDERS].at);
    job.borders = borders;
    job.tokens = (int64_t *)(data + columns[TOKENS].at);
    job.positions = (int64_t *)(data + columns[POSITIONS].at);
    job.mask = data + columns[MASK].at;
    job.logprobs = (float *)(data + columns[LOGPROBS].at);
    job.advantages = (float *)(data + columns[ADVANTAGES].at);
    borders[0] = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        borders[i + 1] = borders[i] + (int32_t)self->sources[i].length;
    }
    if (!hold_all(self->sources, self->refs, self->count)) {
        return NULL;
    }
    const int clean = py_copy_job_run(&job, self->count, self->total, threads);
    let_go_all(self->sources, self->refs, self->count);
    PyObject *result = clean < 0 ? NULL : PyTuple_New(COLUMNS + 1);
    if (result != NULL && !lay_out(result, memory, columns)) {
        Py_CLEAR(result);
    }
    if (result != NULL) {
        PyTuple_SET_ITEM(result, COLUMNS, PyBool_FromLong(clean));
    }
    return result;
}

/* ---- Type ---- */

static PyObject *py_plan_trajectories(PackPlanObject *self, void *Py_UNUSED(closure)) {
    return PyList_GetSlice(self->trajectories, 0, self->count);
}

static PyObject *py_plan_extras(PackPlanObject *self, void *Py_UNUSED(closure)) {
    return py_extras_describe(&self->extras, self->count);
}

static PyGetSetDef getters[] = {
    {"trajectories", (getter)py_plan_trajectories, NULL, NULL, NULL},
    {"extras", (getter)py_plan_extras, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define MEMBER(name, type, field) {name, type, offsetof(PackPlanObject, field), READONLY, NULL}
static PyMemberDef members[] = {
    MEMBER("sizes", T_OBJECT_EX, sizes),
    MEMBER("samples", T_OBJECT_EX, samples),
    MEMBER("instance_ids", T_OBJECT_EX, ids),
    MEMBER("field_names", T_OBJECT_EX, field_names),
    MEMBER("total", T_ULONGLONG, total),
    MEMBER("longest", T_ULONGLONG, longest),
    MEMBER("nbytes", T_ULONGLONG, bytes),
    MEMBER("has", T_UBYTE, has),
    MEMBER("lacks", T_UBYTE, lacks),
    MEMBER("has_logprobs", T_BOOL, has_logprobs),
    MEMBER("has_rows", T_BOOL, rows),
    MEMBER("has_metas", T_BOOL, metas),
    MEMBER("scores_fit", T_BOOL, scores_fit),
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    METHOD("gather", py_plan_gather, METH_VARARGS, NULL),
    METHOD("table_bytes", py_plan_table_bytes, METH_O, NULL),
    METHOD("table", py_plan_table, METH_VARARGS, NULL),
    METHOD("copy_table", py_plan_copy_table, METH_VARARGS, NULL),
    {NULL, NULL, 0, NULL},
};

PyTypeObject PackPlanType = {
    TYPE_BASICS("PackPlan", PackPlanObject, py_plan_dealloc, 0),
    .tp_getset = getters,
    .tp_members = members,
    .tp_methods = methods,
    .tp_new = py_plan_new,
};
