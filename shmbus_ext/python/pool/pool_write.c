/* PoolWrite: a writable buffer over a slot's payload, by the publisher or by a rank.
 *
 * Invariants: a version is not finished while a buffer of it is out. An abandoned version keeps its
 * slot until its last buffer is gone, so no late store lands in a newer version. */
#include "python/pool/pool.h"

#include "base/copy.h"

/* Report an abandoned version at once: ranks and readers wait for it. */
static void give_up(PoolWriteObject *self, const char *error) {
    self->given_up = true;
    if (!py_companion_is_own(&self->pool->base)) {
        return;
    }
    if (self->is_piece) {
        publish_piece_failed(&self->pool->c, self->sequence, error);
    } else {
        publish_give_up(&self->pool->c);
    }
}

static void let_go(PoolWriteObject *self) {
    self->ended = true;
    if (!py_companion_is_own(&self->pool->base)) {
        return;
    }
    if (self->is_piece) {
        publish_piece_let_go(&self->pool->c, self->slot);
    } else {
        publish_let_go(&self->pool->c, self->slot);
    }
}

static PyObject *py_pool_write_new(PoolObject *pool, uint32_t slot, bool is_piece,
                                   PyObject *meta) {
    PoolWriteObject *self = (PoolWriteObject *)PoolWriteType.tp_alloc(&PoolWriteType, 0);
    if (self != NULL) {
        self->pool = pool;
        self->slot = slot;
        self->is_piece = is_piece;
        self->meta = Py_XNewRef(meta);
        py_companion_add_user(&pool->base);
    }
    return (PyObject *)self;
}

static PyObject *not_begun(PoolWriteObject *self, enum shared_status status) {
    self->ended = true;
    PyObject *result = py_companion_status(&self->pool->base, status);
    Py_DECREF(self);
    return result;
}

/* pool_begin(pool, version, bytes, meta, text, ranks, patches): a PoolWrite, or a status. */
static PyObject *py_pool_begin(PyObject *Py_UNUSED(module), PyObject *args) {
    PoolObject *pool;
    PyObject *meta;
    long long version;
    unsigned long long bytes;
    struct version_facts facts;
    int patches;
    if (!PyArg_ParseTuple(args, "O!LKSsIp", &PoolType, &pool, &version, &bytes, &meta, &facts.text,
                          &facts.ranks, &patches) ||
        !py_companion_usable(&pool->base)) {
        return NULL;
    }
    facts.patches = patches != 0;
    facts.version = version;
    facts.bytes = bytes;
    facts.meta = PyBytes_AS_STRING(meta);
    facts.meta_bytes = (uint64_t)PyBytes_GET_SIZE(meta);
    NEVER(pool->c.rank != 0, NULL);
    if (bytes > pool->c.slot_bytes || facts.meta_bytes > pool->c.meta_bytes || facts.ranks < 1 ||
        facts.ranks > POOL_MAX_RANKS) {
        return PyErr_Format(PyExc_ValueError,
                            "pool '%U': expected at most %llu bytes, %llu of meta and 1 to %u "
                            "ranks, got %llu, %zd and %u; make a pool with larger slots",
                            pool->base.name, U64(pool->c.slot_bytes), U64(pool->c.meta_bytes),
                            POOL_MAX_RANKS, bytes, PyBytes_GET_SIZE(meta), facts.ranks);
    }
    PoolWriteObject *self = (PoolWriteObject *)py_pool_write_new(pool, 0, false, meta);
    if (self == NULL) {
        return NULL;
    }
    uint64_t sequence = 0;
    enum shared_status status = publish_begin(&pool->c, &facts, &self->slot, &sequence);
    if (status != SHARED_OK) {
        return not_begun(self, status);
    }
    self->sequence = sequence;
    self->version = version;
    self->bytes = bytes;
    patch_begin(&self->patch, &pool->c, self->slot);
    return (PyObject *)self;
}

/* pool_join(pool): a PoolWrite of the version under way at rank 0, or a status. */
static PyObject *py_pool_join(PyObject *Py_UNUSED(module), PyObject *args) {
    PoolObject *pool;
    struct slot_row row;
    if (!PyArg_ParseTuple(args, "O!", &PoolType, &pool) || !py_companion_usable(&pool->base)) {
        return NULL;
    }
    NEVER(pool->c.rank < 1, NULL);
    PoolWriteObject *self = (PoolWriteObject *)py_pool_write_new(pool, 0, true, NULL);
    if (self == NULL) {
        return NULL;
    }
    enum shared_status status = publish_join(&pool->c, &self->slot, &row);
    if (status != SHARED_OK) {
        return not_begun(self, status);
    }
    self->sequence = row.sequence;
    self->version = row.version;
    self->bytes = row.bytes;
    patch_begin(&self->patch, &pool->c, self->slot);
    self->meta = PyBytes_FromStringAndSize((char *)pool_meta(&pool->c, self->slot),
                                           (Py_ssize_t)row.meta_bytes);
    if (self->meta == NULL) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void py_pool_write_dealloc(PoolWriteObject *self) {
    if (!self->ended && !self->given_up) {
        give_up(self, "its process dropped it");
    }
    if (!self->ended) {
        let_go(self);
    }
    py_companion_drop_user(&self->pool->base);
    Py_XDECREF(self->meta);
    PyObject_Free(self);
}

/* False with BufferError after the end of the write. */
static bool py_pool_write_is_open(const PoolWriteObject *self) {
    if (self->ended || self->given_up || !py_companion_is_own(&self->pool->base)) {
        return py_refuse(PyExc_BufferError, "this version is not being written any more");
    }
    return true;
}

/* Count a writer out; a slot is kept while writers remain. */
static void py_pool_write_leave(PoolWriteObject *self) {
    self->buffers--;
    if (self->buffers == 0 && self->given_up && !self->ended) {
        let_go(self);
    }
}

static int py_pool_write_buffer(PoolWriteObject *self, Py_buffer *view, int flags) {
    if (!py_pool_write_is_open(self)) {
        view->obj = NULL;
        return -1;
    }
    if (PyBuffer_FillInfo(view, (PyObject *)self, pool_payload(&self->pool->c, self->slot),
                          (Py_ssize_t)self->bytes, 0, flags) < 0) {
        return -1;
    }
    self->buffers++;
    return 0;
}

static void py_pool_write_release(PoolWriteObject *self, Py_buffer *Py_UNUSED(view)) {
    py_pool_write_leave(self);
}

static bool has_no_buffers(const PoolWriteObject *self) {
    if (self->buffers > 0) {
        return py_refuse(
            PyExc_BufferError,
            "%zd buffers of this version are still out: delete the arrays, and release "
            "the memoryviews, before it is finished",
            self->buffers);
    }
    return true;
}

/* finish(digests): publish the version to readers, with digests per block if `digests`. */
static PyObject *py_pool_write_finish(PoolWriteObject *self, PyObject *args) {
    int with_digests;
    if (!PyArg_ParseTuple(args, "p", &with_digests) || !py_pool_write_is_open(self) || !has_no_buffers(self)) {
        return NULL;
    }
    patch_seal(&self->patch);
    if (self->is_piece) {
        publish_piece_done(&self->pool->c, self->sequence);
        let_go(self);
        Py_RETURN_NONE;
    }
    const struct pool *pool = &self->pool->c;
    uint32_t digests = 0;
    if (with_digests) {
        Py_BEGIN_ALLOW_THREADS
        digests = digest_blocks(pool_payload(pool, self->slot), self->bytes, pool->block_bytes,
                                pool_digests(pool, self->slot));
        Py_END_ALLOW_THREADS
        if (!py_pool_write_is_open(self)) { /* ended meanwhile by a second thread */
            return NULL;
        }
    }
    if (!patch_settle(&self->pool->c, self->slot, self->sequence)) {
        patch_give_up(&self->patch);
    }
    publish_finish(&self->pool->c, self->slot, self->sequence, digests);
    self->ended = true;
    Py_RETURN_NONE;
}

/* give_up(error): abandon the version and tell ranks and readers at once; the newest version
 * stays. */
static PyObject *py_pool_write_give_up(PoolWriteObject *self, PyObject *args) {
    const char *error;
    if (!PyArg_ParseTuple(args, "s", &error)) {
        return NULL;
    }
    if (!self->ended && !self->given_up) {
        give_up(self, error);
    }
    if (!self->ended && self->buffers == 0) {
        let_go(self);
    }
    Py_RETURN_NONE;
}

static PyMethodDef write_methods[] = {
    METHOD("finish", py_pool_write_finish, METH_VARARGS, NULL),
    METHOD("give_up", py_pool_write_give_up, METH_VARARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef write_members[] = {
    {"slot", T_UINT, offsetof(PoolWriteObject, slot), READONLY, NULL},
    {"sequence", T_ULONGLONG, offsetof(PoolWriteObject, sequence), READONLY, NULL},
    {"version", T_LONGLONG, offsetof(PoolWriteObject, version), READONLY, NULL},
    {"bytes", T_ULONGLONG, offsetof(PoolWriteObject, bytes), READONLY, NULL},
    {"meta", T_OBJECT_EX, offsetof(PoolWriteObject, meta), READONLY, NULL},
    {"ended", T_BOOL, offsetof(PoolWriteObject, ended), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyBufferProcs write_buffer = {.bf_getbuffer = (getbufferproc)py_pool_write_buffer,
                                     .bf_releasebuffer = (releasebufferproc)py_pool_write_release};

PyTypeObject PoolWriteType = {
    TYPE_BASICS("PoolWrite", PoolWriteObject, py_pool_write_dealloc, 0),
    .tp_methods = write_methods,
    .tp_members = write_members,
    .tp_as_buffer = &write_buffer,
};

/* ---- Weights exceed every cache: ordinary stores would fetch every written line first, a third of
 * the traffic. */
/* pool_copy(target, source): copy between two disjoint buffers of equal length. */
static PyObject *py_pool_copy(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer target, source;
    if (!PyArg_ParseTuple(args, "w*y*", &target, &source)) {
        return NULL;
    }
    bool fits = target.len == source.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_non_temporal(target.buf, source.buf, (size_t)source.len);
        copy_fence();
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "copy: expected buffers of one length, got %zd and %zd",
                     target.len, source.len);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* ---- Functions over patches. They run without the interpreter lock; the write or lease argument
 * holds the slot meanwhile.
 *
 * Invariant: a patch place from Python is checked like an unknown number. */
/* pool_patch_put(write, offset, rows, row_bytes, stride, width, source): number of changed elements
 * of the piece; None for a write without a patch. */
static PyObject *py_pool_patch_put(PyObject *Py_UNUSED(module), PyObject *args) {
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
    self->buffers++;
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

/* pool_patch_is_made(write): True if the write has, or had, a patch. */
static PyObject *py_pool_patch_is_made(PyObject *Py_UNUSED(module), PyObject *args) {
    PoolWriteObject *self;
    if (!PyArg_ParseTuple(args, "O!", &PoolWriteType, &self)) {
        return NULL;
    }
    return PyBool_FromLong(self->patch.base != NULL);
}

/* ---- A patch as bytes, to carry a version to a second pool with the same base: the runs of every
 * rank in order, with their streams. */
/* The next run of a patch's bytes, checked against a version of `bytes` bytes; false at the end or
 * for a damaged run. */
static bool next_run(const struct patch_view *view, const uint8_t **at, uint64_t bytes,
                     struct patch_run *run, const uint8_t **stream) {
    if (!patch_next(view, at, run, stream)) {
        return false;
    }
    struct patch_shape shape = {run->rows, run->row_bytes, run->stride, run->width};
    return patch_fits(run->offset, &shape, bytes);
}

static struct patch_view view_of_bytes(const Py_buffer *runs) {
    const uint8_t *start = runs->buf;
    return (struct patch_view){.runs = start, .end = start + runs->len};
}

/* pool_patch_bytes(lease): (base sequence, bytes) of a version's patch, checksums compared; None
 * for a missing or damaged patch. */
static PyObject *py_pool_patch_bytes(PyObject *Py_UNUSED(module), PyObject *args) {
    PoolLeaseObject *self;
    if (!PyArg_ParseTuple(args, "O!", &PoolLeaseType, &self) || !py_pool_lease_is_readable(self)) {
        return NULL;
    }
    struct patch_view views[POOL_MAX_RANKS];
    uint32_t ranks = self->row.ranks;
    bool found = self->row.base_sequence != 0 && ranks <= POOL_MAX_RANKS;
    Py_ssize_t size = 0;
    Py_BEGIN_ALLOW_THREADS
    for (uint32_t rank = 0; found && rank < ranks; rank++) {
        found = patch_find(&self->pool->c, self->slot, &self->row, rank, &views[rank]);
        size += found ? views[rank].end - views[rank].runs : 0;
    }
    Py_END_ALLOW_THREADS
    if (!found) {
        Py_RETURN_NONE;
    }
    PyObject *copy = PyBytes_FromStringAndSize(NULL, size);
    if (copy == NULL) {
        return NULL;
    }
    uint8_t *to = (uint8_t *)PyBytes_AS_STRING(copy);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        size_t length = (size_t)(views[rank].end - views[rank].runs);
        memcpy(to, views[rank].runs, length);
        to += length;
    }
    return Py_BuildValue("(KN)", U64(self->row.base_sequence), copy);
}

/* pool_patch_take(write, runs): write a version by patch bytes and adopt them as its patch. True if
 * this pool's newest version matches their base; on False the contents are invalid. */
static PyObject *py_pool_patch_take(PyObject *Py_UNUSED(module), PyObject *args) {
    PoolWriteObject *self;
    Py_buffer runs;
    if (!PyArg_ParseTuple(args, "O!y*", &PoolWriteType, &self, &runs)) {
        return NULL;
    }
    PyObject *result = NULL;
    if (!py_pool_write_is_open(self)) {
        goto done;
    }
    if (self->patch_in_use) {
        PyErr_SetString(PyExc_BufferError, "another thread writes a piece: write one at a time");
        goto done;
    }
    struct patch_view view = view_of_bytes(&runs);
    const uint8_t *at = view.runs, *stream;
    struct patch_run run;
    bool good = true;
    self->patch_in_use = true;
    self->buffers++;
    Py_BEGIN_ALLOW_THREADS
    while (good && at != view.end) {
        good = next_run(&view, &at, self->bytes, &run, &stream) &&
               patch_put_run(&self->patch, &run, stream);
    }
    Py_END_ALLOW_THREADS
    self->patch_in_use = false;
    py_pool_write_leave(self);
    result = PyBool_FromLong(good);
done:
    PyBuffer_Release(&runs);
    return result;
}

/* pool_patch_crc(runs, payload): checksum over the payload's pieces named by the runs; None for
 * damaged runs or runs beyond the payload. */
static PyObject *py_pool_patch_crc(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer runs, payload;
    if (!PyArg_ParseTuple(args, "y*y*", &runs, &payload)) {
        return NULL;
    }
    struct patch_view view = view_of_bytes(&runs);
    const uint8_t *at = view.runs, *stream;
    struct patch_run run;
    uint32_t crc = 0;
    bool good = true;
    Py_BEGIN_ALLOW_THREADS
    while (good && at != view.end) {
        good = next_run(&view, &at, (uint64_t)payload.len, &run, &stream);
        crc = good ? patch_piece_crc(crc, &run, payload.buf) : crc;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&runs);
    PyBuffer_Release(&payload);
    return good ? PyLong_FromUnsignedLong(crc) : Py_NewRef(Py_None);
}

PyMethodDef py_pool_patch_functions[] = {
    {"pool_begin", py_pool_begin, METH_VARARGS, NULL},
    {"pool_join", py_pool_join, METH_VARARGS, NULL},
    {"pool_copy", py_pool_copy, METH_VARARGS, NULL},
    {"pool_patch_put", py_pool_patch_put, METH_VARARGS, NULL},
    {"pool_patch_is_made", py_pool_patch_is_made, METH_VARARGS, NULL},
    {"pool_patch_bytes", py_pool_patch_bytes, METH_VARARGS, NULL},
    {"pool_patch_take", py_pool_patch_take, METH_VARARGS, NULL},
    {"pool_patch_crc", py_pool_patch_crc, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
