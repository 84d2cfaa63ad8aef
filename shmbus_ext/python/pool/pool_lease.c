/* PoolLease: a read-only buffer over a slot's payload.
 *
 * Invariant: the slot stays leased for the object's life; arrays and tensors over its buffer keep
 * the object alive. An earlier end is impossible because Python cannot revoke a view. */
#include "python/pool/pool.h"

#include "base/checksum.h"

bool py_pool_is_reader(PoolObject *self) {
    if (!py_companion_usable(&self->base)) {
        return false;
    }
    NEVER(self->c.reader < 0, false);
    return true;
}

/* pool_lease(pool, after[, version]): a PoolLease of the newest version after the sequence `after`,
 * or of the named version; or a status. */
PyObject *py_pool_lease(PyObject *Py_UNUSED(module), PyObject *args) {
    PoolObject *pool;
    unsigned long long after;
    long long version = 0;
    if (!PyArg_ParseTuple(args, "O!K|L", &PoolType, &pool, &after, &version) ||
        !py_pool_is_reader(pool)) {
        return NULL;
    }
    /* Allocate before leasing the slot: every lease then has an owner. */
    PoolLeaseObject *self = PyObject_New(PoolLeaseObject, &PoolLeaseType);
    if (self == NULL) {
        return NULL;
    }
    self->pool = NULL;
    enum shared_status status =
        PyTuple_GET_SIZE(args) > 2 ? lease_version(&pool->c, version, &self->slot, &self->row)
                                   : lease_latest(&pool->c, after, &self->slot, &self->row);
    if (status != SHARED_OK) {
        Py_DECREF(self);
        return py_companion_status(&pool->base, status);
    }
    self->pool = pool;
    py_companion_add_user(&pool->base);
    return (PyObject *)self;
}

static void py_pool_lease_dealloc(PoolLeaseObject *self) {
    if (self->pool != NULL) {
        if (py_companion_is_own(&self->pool->base)) {
            lease_drop(&self->pool->c, self->slot);
        }
        py_companion_drop_user(&self->pool->base);
    }
    PyObject_Free(self);
}

bool py_pool_lease_is_readable(const PoolLeaseObject *self) {
    if (!py_companion_is_own(&self->pool->base)) {
        return py_refuse(PyExc_BufferError,
                         "this lease was taken before a fork: its memory is not mapped in the "
                         "child; open the pool there");
    }
    return true;
}

static int py_pool_lease_buffer(PoolLeaseObject *self, Py_buffer *view, int flags) {
    if (!py_pool_lease_is_readable(self)) {
        view->obj = NULL;
        return -1;
    }
    return PyBuffer_FillInfo(view, (PyObject *)self, pool_payload(&self->pool->c, self->slot),
                             (Py_ssize_t)self->row.bytes, 1, flags);
}

/* meta(): a copy of the meta; None on a checksum mismatch. */
static PyObject *py_pool_lease_meta(PoolLeaseObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_pool_lease_is_readable(self)) {
        return NULL;
    }
    PyObject *copy = PyBytes_FromStringAndSize((char *)pool_meta(&self->pool->c, self->slot),
                                               (Py_ssize_t)self->row.meta_bytes);
    if (copy != NULL && shmbus_crc32c(0, PyBytes_AS_STRING(copy), self->row.meta_bytes) !=
                            self->row.meta_crc) {
        Py_SETREF(copy, Py_NewRef(Py_None));
    }
    return copy;
}

/* check(first, count): the first block of the range with a wrong digest, or None. */
static PyObject *py_pool_lease_check(PoolLeaseObject *self, PyObject *args) {
    unsigned int first, count;
    if (!PyArg_ParseTuple(args, "II", &first, &count) || !py_pool_lease_is_readable(self)) {
        return NULL;
    }
    const struct pool *pool = &self->pool->c;
    uint32_t blocks = self->row.digests;
    uint32_t room = (uint32_t)((self->row.bytes + pool->block_bytes - 1) / pool->block_bytes);
    uint32_t end = blocks < room ? blocks : room;
    uint32_t from = first < end ? first : end;
    uint32_t to = count < end - from ? from + count : end;
    uint32_t wrong;
    Py_BEGIN_ALLOW_THREADS
    wrong = digest_first_wrong(pool_payload(pool, self->slot), self->row.bytes, pool->block_bytes,
                               pool_digests(pool, self->slot), from, to);
    Py_END_ALLOW_THREADS
    if (wrong == to) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLong(wrong);
}

static PyObject *py_pool_lease_text(PoolLeaseObject *self, void *Py_UNUSED(ignored)) {
    return FIELD_TEXT(self->row.text);
}

static PyMethodDef lease_methods[] = {
    METHOD("meta", py_pool_lease_meta, METH_NOARGS, NULL),
    METHOD("check", py_pool_lease_check, METH_VARARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef lease_getset[] = {
    {"text", (getter)py_pool_lease_text, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef lease_members[] = {
    {"slot", T_UINT, offsetof(PoolLeaseObject, slot), READONLY, NULL},
    {"sequence", T_ULONGLONG, offsetof(PoolLeaseObject, row.sequence), READONLY, NULL},
    {"version", T_LONGLONG, offsetof(PoolLeaseObject, row.version), READONLY, NULL},
    {"bytes", T_ULONGLONG, offsetof(PoolLeaseObject, row.bytes), READONLY, NULL},
    {"digests", T_UINT, offsetof(PoolLeaseObject, row.digests), READONLY, NULL},
    {"ranks", T_UINT, offsetof(PoolLeaseObject, row.ranks), READONLY, NULL},
    {"published_unix_ns", T_ULONGLONG, offsetof(PoolLeaseObject, row.published_unix_ns), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyBufferProcs lease_buffer = {.bf_getbuffer = (getbufferproc)py_pool_lease_buffer};

PyTypeObject PoolLeaseType = {
    TYPE_BASICS("PoolLease", PoolLeaseObject, py_pool_lease_dealloc, 0),
    .tp_methods = lease_methods,
    .tp_members = lease_members,
    .tp_getset = lease_getset,
    .tp_as_buffer = &lease_buffer,
};
