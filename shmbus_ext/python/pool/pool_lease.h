/* PoolLease: one version of a slot pool, readable for as long as the object lives. */
#ifndef SHMBUS_PYTHON_POOL_POOL_LEASE_H
#define SHMBUS_PYTHON_POOL_POOL_LEASE_H

#include "python/binding.h"
#include "python/pool/pool_object.h"

typedef struct {
    PyObject_HEAD
    PoolObject *pool;
    uint32_t slot;
    struct slot_row row; /* a private copy, which was checked */
} PoolLeaseObject;

/* False with BufferError in a forked child, which has no memory of it. */
bool py_pool_lease_is_readable(const PoolLeaseObject *self);

extern PyTypeObject PoolLeaseType;

bool py_pool_lease_add_functions(PyObject *module);

#endif
