/* Round numbers for Python: next_round of the module. */
#ifndef SHMBUS_PYTHON_ROUNDS_FUNCTION_H
#define SHMBUS_PYTHON_ROUNDS_FUNCTION_H

#include "python/binding.h"

bool py_rounds_add_functions(PyObject *module);

#endif
