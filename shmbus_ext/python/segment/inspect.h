/* What is read of a segment by its file, without a mapping: layout, locks, records. */
#ifndef SHMBUS_PYTHON_INSPECT_H
#define SHMBUS_PYTHON_INSPECT_H

#include "python/binding.h"

bool py_inspect_add_functions(PyObject *module);

#endif
