/* Patches of versions: made by a PoolWrite, found and applied by a PoolLease. */
#ifndef SHMBUS_PYTHON_POOL_POOL_PATCH_H
#define SHMBUS_PYTHON_POOL_POOL_PATCH_H

#include "python/binding.h"

bool py_pool_patch_add_functions(PyObject *module);

#endif
