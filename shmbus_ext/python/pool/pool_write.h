/* PoolWrite: a version of a slot pool while it is being written. */
#ifndef SHMBUS_PYTHON_POOL_POOL_WRITE_H
#define SHMBUS_PYTHON_POOL_POOL_WRITE_H

#include "python/binding.h"

extern PyTypeObject PoolWriteType;

bool py_pool_write_add_functions(PyObject *module);

#endif
