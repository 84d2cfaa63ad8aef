/* The table that a kernel gathers a batch by. */
#ifndef SHMBUS_PYTHON_GATHER_PLAN_H
#define SHMBUS_PYTHON_GATHER_PLAN_H

#include "python/binding.h"

bool py_gather_plan_add_functions(PyObject *module);

#endif
