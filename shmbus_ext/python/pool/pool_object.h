/* SlotPool: one mapping of a slot pool, and what happens to it at fork and at close. */
#ifndef SHMBUS_PYTHON_POOL_POOL_OBJECT_H
#define SHMBUS_PYTHON_POOL_POOL_OBJECT_H

#include "python/binding.h"
#include "python/companion.h"
#include "pool/pool.h"

typedef struct {
    CompanionObject base;
    struct pool c;
} PoolObject;

extern PyTypeObject PoolType;

bool py_pool_add_constants(PyObject *module);

#endif
