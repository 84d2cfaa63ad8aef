/* Functions over patches. They run without the interpreter's lock; the slot is kept meanwhile by
 * the write or the lease that they are given.
 *
 * Invariant: a place in a patch that Python hands back is checked like one that was never seen. */
#include "python/pool/pool_patch.h"

#include "python/pool/pool_lease.h"
#include "python/pool/pool_write.h"
#include "pool/patch.h"

/* pool_patch_put(write, offset, rows, row_bytes, stride, width, source): how many elements of the
 * piece changed; None where it was written without a patch. */
static PyObject *py_pool_patch_put(PyObject *module, PyObject *args) {
    (void)module;
    PoolWriteObject *self;
    unsigned long long offset, rows, row_bytes, stride;
    unsigned int width;
    Py_buffer source;
    if (!PyArg_ParseTuple(args, "O!KKKKIy*", &PoolWriteType, &self, &offset, &rows, &row_bytes,
                          &stride, &width, &source)) {
        return NULL;
    }
    struct patch_shape shape = {rows, row_bytes, stride, width};
    PyObject *result = NULL;
    if (!py_pool_write_is_open(self)) {
        goto done;
    }
    if (!patch_fits(offset, &shape, self->bytes) ||
        (uint64_t)source.len != shape.rows * shape.row_bytes) {
        PyErr_Format(PyExc_ValueError,
                     "piece: expected rows inside the version's %llu bytes, in elements of 1, 2 or "
                     "4 bytes, and a source of as many; got %llu rows of %llu bytes, one each "
                     "%llu, from %llu on, in elements of %u, and a source of %zd",
                     self->bytes, rows, row_bytes, stride, offset, width, source.len);
        goto done;
    }
    if (self->patch_in_use) {
        PyErr_SetString(PyExc_BufferError, "another thread writes a piece: write one at a time");
        goto done;
    }
    uint64_t changes;
    enum patch_put put;
    self->patch_in_use = true;
    py_pool_write_enter(self);
    Py_BEGIN_ALLOW_THREADS
    put = patch_put(&self->patch, offset, &shape, source.buf, &changes);
    Py_END_ALLOW_THREADS
    self->patch_in_use = false;
    py_pool_write_leave(self);
    result = put == PATCH_MADE ? PyLong_FromUnsignedLongLong(changes) : Py_NewRef(Py_None);
done:
    PyBuffer_Release(&source);
    return result;
}

/* pool_patch_give_up(write): the version gets no patch. */
static PyObject *py_pool_patch_give_up(PyObject *module, PyObject *args) {
    (void)module;
    PoolWriteObject *self;
    if (!PyArg_ParseTuple(args, "O!", &PoolWriteType, &self)) {
        return NULL;
    }
    if (!self->patch_in_use) {
        patch_give_up(&self->patch);
    }
    Py_RETURN_NONE;
}

/* pool_patch_is_made(write): whether a patch is being made, or was. */
static PyObject *py_pool_patch_is_made(PyObject *module, PyObject *args) {
    (void)module;
    PoolWriteObject *self;
    if (!PyArg_ParseTuple(args, "O!", &PoolWriteType, &self)) {
        return NULL;
    }
    return PyBool_FromLong(self->patch.base != NULL);
}

static PyObject *describe_run(uint32_t rank, uint64_t place, const struct patch_run *run) {
    return Py_BuildValue("(IKKKKKIKK)", rank, (unsigned long long)place,
                         (unsigned long long)run->offset, (unsigned long long)run->rows,
                         (unsigned long long)run->row_bytes, (unsigned long long)run->stride,
                         run->width, (unsigned long long)run->changes,
                         (unsigned long long)run->bytes);
}

/* Adds the runs of a rank's patch; false with or without an error set. */
static bool add_runs(PyObject *list, const PoolLeaseObject *self, uint32_t rank) {
    struct patch_view view;
    struct patch_run run;
    const uint8_t *stream;
    uint32_t count = 0;
    bool found;
    Py_BEGIN_ALLOW_THREADS
    found = patch_find(&self->pool->c, self->slot, &self->row, rank, &view);
    Py_END_ALLOW_THREADS
    if (!found) {
        return false;
    }
    const uint8_t *at = view.runs;
    for (;;) {
        uint64_t place = (uint64_t)(at - view.runs);
        if (!patch_next(&view, &at, &run, &stream)) {
            break;
        }
        struct patch_shape shape = {run.rows, run.row_bytes, run.stride, run.width};
        if (!patch_fits(run.offset, &shape, self->row.bytes)) {
            return false;
        }
        PyObject *item = describe_run(rank, place, &run);
        bool added = item != NULL && PyList_Append(list, item) == 0;
        Py_XDECREF(item);
        if (!added) {
            return false;
        }
        count++;
    }
    return at == view.end && count == view.count;
}

/* pool_patch_runs(lease): (base sequence, base version, runs), all of which were checked; None where
 * the version has no patch, False where it has one that is not what was made. */
static PyObject *py_pool_patch_runs(PyObject *module, PyObject *args) {
    (void)module;
    PoolLeaseObject *self;
    if (!PyArg_ParseTuple(args, "O!", &PoolLeaseType, &self) || !py_pool_lease_is_readable(self)) {
        return NULL;
    }
    if (self->row.base_sequence == 0) {
        Py_RETURN_NONE;
    }
    PyObject *list = PyList_New(0);
    if (list == NULL) {
        return NULL;
    }
    for (uint32_t rank = 0; rank < self->row.ranks; rank++) {
        if (!add_runs(list, self, rank)) {
            Py_DECREF(list);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
        }
    }
    return Py_BuildValue("(KLN)", (unsigned long long)self->row.base_sequence,
                         (long long)self->row.base_version, list);
}

/* The run at a place of a rank's patch, once more from the slot: memory that others share. */
static bool run_at(const PoolLeaseObject *self, uint32_t rank, uint64_t place,
                   struct patch_run *run, const uint8_t **stream) {
    const struct pool *pool = &self->pool->c;
    uint32_t ranks = self->row.ranks;
    if (self->row.base_sequence == 0 || rank >= ranks) {
        return false;
    }
    uint64_t share = pool_patch_share(pool, ranks), head = sizeof(struct patch_head);
    if (share < head || place > share - head) {
        return false;
    }
    const uint8_t *start = pool_patches(pool, self->slot) + rank * share;
    struct patch_view view = {.runs = start + head, .end = start + share};
    const uint8_t *at = view.runs + place;
    if (!patch_next(&view, &at, run, stream)) {
        return false;
    }
    struct patch_shape shape = {run->rows, run->row_bytes, run->stride, run->width};
    return patch_fits(run->offset, &shape, self->row.bytes);
}

/* pool_patch_apply(lease, rank, place, target, offset): applies a run to a buffer that stands for
 * the version's bytes from `offset` on. Whether those were the base's; else some may be changed. */
static PyObject *py_pool_patch_apply(PyObject *module, PyObject *args) {
    (void)module;
    PoolLeaseObject *self;
    unsigned int rank;
    unsigned long long place, offset;
    Py_buffer target;
    if (!PyArg_ParseTuple(args, "O!IKw*K", &PoolLeaseType, &self, &rank, &place, &target,
                          &offset)) {
        return NULL;
    }
    struct patch_run run;
    const uint8_t *stream;
    PyObject *result = NULL;
    if (!py_pool_lease_is_readable(self)) {
        goto done;
    }
    struct patch_shape shape = {0};
    bool good = run_at(self, rank, place, &run, &stream) && run.offset >= offset;
    if (good) {
        shape = (struct patch_shape){run.rows, run.row_bytes, run.stride, run.width};
        good = patch_fits(run.offset - offset, &shape, (uint64_t)target.len);
    }
    if (!good) {
        PyErr_Format(PyExc_ValueError,
                     "patch: expected a run of rank %u inside %zd bytes from %llu on, found none "
                     "at place %llu",
                     rank, target.len, offset, place);
        goto done;
    }
    struct patch_in in = {.at = stream, .end = stream + run.bytes};
    Py_BEGIN_ALLOW_THREADS
    good = patch_apply(&in, &shape, (uint8_t *)target.buf + (run.offset - offset));
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(good && in.at == in.end && in.base_digest == run.base_digest);
done:
    PyBuffer_Release(&target);
    return result;
}

/* pool_same(one, other): whether two buffers have the same bytes. */
static PyObject *py_pool_same(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer one, other;
    if (!PyArg_ParseTuple(args, "y*y*", &one, &other)) {
        return NULL;
    }
    bool same = one.len == other.len;
    if (same) {
        Py_BEGIN_ALLOW_THREADS
        same = memcmp(one.buf, other.buf, (size_t)one.len) == 0;
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&one);
    PyBuffer_Release(&other);
    return PyBool_FromLong(same);
}

static PyMethodDef functions[] = {
    {"pool_patch_put", py_pool_patch_put, METH_VARARGS, NULL},
    {"pool_patch_give_up", py_pool_patch_give_up, METH_VARARGS, NULL},
    {"pool_patch_is_made", py_pool_patch_is_made, METH_VARARGS, NULL},
    {"pool_patch_runs", py_pool_patch_runs, METH_VARARGS, NULL},
    {"pool_patch_apply", py_pool_patch_apply, METH_VARARGS, NULL},
    {"pool_same", py_pool_same, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_pool_patch_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
