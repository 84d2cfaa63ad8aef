/* What a pool's tables say, for messages and for `shmbus weights`. */
#ifndef SHMBUS_PYTHON_POOL_POOL_ROWS_H
#define SHMBUS_PYTHON_POOL_POOL_ROWS_H

#include "python/binding.h"

bool py_pool_rows_add_functions(PyObject *module);

#endif
