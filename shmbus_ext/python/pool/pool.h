/* A slot pool for Python: the handle, leases of versions, writes of them. */
#ifndef SHMBUS_PYTHON_POOL_POOL_H
#define SHMBUS_PYTHON_POOL_POOL_H

#include "python/binding.h"
#include "pool/patch.h"
#include "pool/pool.h"
#include "python/companion.h"

/* ---- SlotPool: one mapping of a slot pool, and what happens to it at fork and at close. */
typedef struct {
    CompanionObject base;
    struct pool c;
} PoolObject;

extern PyTypeObject PoolType;

/* ---- PoolLease: one version of a slot pool, readable for as long as the object lives. */
typedef struct {
    PyObject_HEAD
    PoolObject *pool;
    uint32_t slot;
    struct slot_row row; /* a private copy, which was checked */
} PoolLeaseObject;

/* False with BufferError in a forked child, which has no memory of it. */
bool py_pool_lease_is_readable(const PoolLeaseObject *self);

extern PyTypeObject PoolLeaseType;

/* ---- PoolWrite: a version of a slot pool while it is being written. */
typedef struct {
    PyObject_HEAD
    PoolObject *pool;
    uint32_t slot;
    bool is_piece; /* another rank is the publisher */
    bool ended;
    bool given_up;
    Py_ssize_t buffers; /* out, and calls that write without one */
    unsigned long long sequence, bytes;
    long long version;
    PyObject *meta;
    struct patch_maker patch;
    bool patch_in_use; /* by a thread that runs without the interpreter's lock */
} PoolWriteObject;

extern PyTypeObject PoolWriteType;

/* What module.c adds. */
extern const struct named_value py_pool_constants[];
extern PyMethodDef py_pool_lease_functions[];
extern PyMethodDef py_pool_patch_functions[];
extern PyMethodDef py_pool_rows_functions[];

#endif
