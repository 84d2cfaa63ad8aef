/* Copying large pieces between buffers, past the caches. */
#ifndef SHMBUS_PYTHON_POOL_POOL_COPY_H
#define SHMBUS_PYTHON_POOL_POOL_COPY_H

#include "python/binding.h"

bool py_pool_copy_add_functions(PyObject *module);

#endif
