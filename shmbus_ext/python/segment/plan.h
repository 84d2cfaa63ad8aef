/* The sizes of a segment that is not made yet. */
#ifndef SHMBUS_PYTHON_PLAN_H
#define SHMBUS_PYTHON_PLAN_H

#include "python/binding.h"

bool py_plan_add_functions(PyObject *module);

#endif
