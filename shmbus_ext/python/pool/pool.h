/* A slot pool for Python: the handle, leases of versions, writes of versions. */
#pragma once

#include "python/binding.h"
#include "pool/patch.h"
#include "pool/pool.h"
#include "python/companion.h"

/* ---- SlotPool: one mapping of a slot pool, and its treatment at fork and at close. */
typedef struct {
    CompanionObject base;
    struct pool c;
} PoolObject;

extern PyTypeObject PoolType;
/* True for a usable handle of a reader; false with an exception. */
bool py_pool_is_reader(PoolObject *self);

/* ---- PoolLease: one version of a slot pool, readable during the object's life. */
typedef struct {
    PyObject_HEAD
    PoolObject *pool;
    uint32_t slot;
    struct slot_row row; /* a private, checked copy */
} PoolLeaseObject;

/* False with BufferError in a forked child, where the memory is unmapped. */
bool py_pool_lease_is_readable(const PoolLeaseObject *self);

extern PyTypeObject PoolLeaseType;

/* ---- PoolWrite: a version of a slot pool during its write. */
typedef struct {
    PyObject_HEAD
    PoolObject *pool;
    uint32_t slot;
    bool is_piece; /* the publisher is a different rank */
    bool ended;
    bool given_up;
    Py_ssize_t buffers; /* buffers out, plus calls writing without a buffer */
    unsigned long long sequence, bytes;
    long long version;
    PyObject *meta;
    struct patch_maker patch;
    bool patch_in_use; /* by a thread without the interpreter lock */
} PoolWriteObject;

extern PyTypeObject PoolWriteType;

/* Registered by module.c. */
PyObject *py_pool_lease(PyObject *module, PyObject *args);
extern PyMethodDef py_pool_patch_functions[];
extern PyMethodDef py_pool_rows_functions[];
