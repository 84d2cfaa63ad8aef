/* Records of a block into a producer's lane. */
#ifndef SHMBUS_PYTHON_IMPORT_BLOCK_H
#define SHMBUS_PYTHON_IMPORT_BLOCK_H

#include "python/binding.h"

bool py_import_add_functions(PyObject *module);

#endif
