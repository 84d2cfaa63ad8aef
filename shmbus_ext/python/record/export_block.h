/* Records of a reader as a block, for another bus. */
#ifndef SHMBUS_PYTHON_EXPORT_BLOCK_H
#define SHMBUS_PYTHON_EXPORT_BLOCK_H

#include "python/binding.h"

bool py_export_add_functions(PyObject *module);

#endif
