/* The retry table for Python: the functions of the module that begin with retry_. */
#ifndef SHMBUS_PYTHON_RETRY_FUNCTIONS_H
#define SHMBUS_PYTHON_RETRY_FUNCTIONS_H

#include "python/binding.h"

bool py_retry_add_functions(PyObject *module);

#endif
