/* PoolLease: one version of a slot pool, readable for as long as the object lives. */
#ifndef SHMBUS_PYTHON_POOL_POOL_LEASE_H
#define SHMBUS_PYTHON_POOL_POOL_LEASE_H

#include "python/binding.h"

extern PyTypeObject PoolLeaseType;

bool py_pool_lease_add_functions(PyObject *module);

#endif
