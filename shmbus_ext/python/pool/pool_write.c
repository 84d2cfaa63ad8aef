/* PoolWrite: a writable buffer over a slot's payload, by the publisher or by a rank.
 *
 * Invariants: a version is not finished while a buffer of it is out. One that is given up keeps its
 * slot until the last buffer is gone, so that no late store lands in another version. */
#include "python/pool/pool_write.h"

#include "pool/digest.h"
#include "pool/publish.h"

/* Says that the version will not be whole, at once: others wait for it. */
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
    PoolWriteObject *self = PyObject_New(PoolWriteObject, &PoolWriteType);
    if (self != NULL) {
        self->pool = pool;
        self->slot = slot;
        self->is_piece = is_piece;
        self->ended = self->given_up = false;
        self->buffers = 0;
        self->meta = Py_XNewRef(meta);
        self->patch.base = NULL;
        self->patch_in_use = false;
        py_companion_add_user(&pool->base);
    }
    return (PyObject *)self;
}

static PyObject *status_of(PoolObject *pool, enum shared_status status) {
    return status == SHARED_SYSTEM_ERROR
               ? py_companion_system_error(&pool->base)
               : PyLong_FromLong(status);
}

/* pool_begin(pool, version, bytes, meta, text, ranks, patches): a PoolWrite, or a status. */
static PyObject *py_pool_begin(PyObject *module, PyObject *args) {
    (void)module;
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
    if (pool->c.rank != 0) {
        return PyErr_Format(PyExc_RuntimeError, "pool '%U': this handle is not rank 0",
                            pool->base.name);
    }
    if (bytes > pool->c.slot_bytes || facts.meta_bytes > pool->c.meta_bytes || facts.ranks < 1 ||
        facts.ranks > POOL_MAX_RANKS) {
        return PyErr_Format(PyExc_ValueError,
                            "pool '%U': expected at most %llu bytes, %llu of meta and 1 to %u "
                            "ranks, got %llu, %zd and %u; make a pool with larger slots",
                            pool->base.name, (unsigned long long)pool->c.slot_bytes,
                            (unsigned long long)pool->c.meta_bytes, POOL_MAX_RANKS, bytes,
                            PyBytes_GET_SIZE(meta), facts.ranks);
    }
    PoolWriteObject *self = (PoolWriteObject *)py_pool_write_new(pool, 0, false, meta);
    if (self == NULL) {
        return NULL;
    }
    uint64_t sequence = 0;
    enum shared_status status = publish_begin(&pool->c, &facts, &self->slot, &sequence);
    if (status != SHARED_OK) {
        self->ended = true;
        PyObject *result = status_of(pool, status);
        Py_DECREF(self);
        return result;
    }
    self->sequence = sequence;
    self->version = version;
    self->bytes = bytes;
    patch_begin(&self->patch, &pool->c, self->slot);
    return (PyObject *)self;
}

/* pool_join(pool): a PoolWrite of the version that rank 0 writes, or a status. */
static PyObject *py_pool_join(PyObject *module, PyObject *args) {
    (void)module;
    PoolObject *pool;
    struct slot_row row;
    if (!PyArg_ParseTuple(args, "O!", &PoolType, &pool) || !py_companion_usable(&pool->base)) {
        return NULL;
    }
    if (pool->c.rank < 1) {
        return PyErr_Format(PyExc_RuntimeError, "pool '%U': this handle is no rank above 0",
                            pool->base.name);
    }
    PoolWriteObject *self = (PoolWriteObject *)py_pool_write_new(pool, 0, true, NULL);
    if (self == NULL) {
        return NULL;
    }
    enum shared_status status = publish_join(&pool->c, &self->slot, &row);
    if (status != SHARED_OK) {
        self->ended = true;
        PyObject *result = status_of(pool, status);
        Py_DECREF(self);
        return result;
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

bool py_pool_write_is_open(const PoolWriteObject *self) {
    if (self->ended || self->given_up || !py_companion_is_own(&self->pool->base)) {
        PyErr_SetString(PyExc_BufferError, "this version is not being written any more");
        return false;
    }
    return true;
}

void py_pool_write_enter(PoolWriteObject *self) {
    self->buffers++;
}

void py_pool_write_leave(PoolWriteObject *self) {
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
    py_pool_write_enter(self);
    return 0;
}

static void py_pool_write_release(PoolWriteObject *self, Py_buffer *view) {
    (void)view;
    py_pool_write_leave(self);
}

static bool has_no_buffers(const PoolWriteObject *self) {
    if (self->buffers > 0) {
        PyErr_Format(PyExc_BufferError,
                     "%zd buffers of this version are still out: delete the arrays, and release "
                     "the memoryviews, before it is finished",
                     self->buffers);
        return false;
    }
    return true;
}

/* finish(digests): readers get the version; digests: whether its blocks get theirs. */
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
        if (!py_pool_write_is_open(self)) { /* another thread ended it meanwhile */
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

/* give_up(error): what was newest stays so; others learn it at once. */
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
    {"finish", (PyCFunction)(void (*)(void))py_pool_write_finish, METH_VARARGS, NULL},
    {"give_up", (PyCFunction)(void (*)(void))py_pool_write_give_up, METH_VARARGS, NULL},
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
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.PoolWrite",
    .tp_basicsize = sizeof(PoolWriteObject),
    .tp_dealloc = (destructor)py_pool_write_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = write_methods,
    .tp_members = write_members,
    .tp_as_buffer = &write_buffer,
};

static PyMethodDef functions[] = {
    {"pool_begin", py_pool_begin, METH_VARARGS, NULL},
    {"pool_join", py_pool_join, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_pool_write_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
