/* What trajectories have: for Python, before a batch is made of them. */
#ifndef SHMBUS_PYTHON_MEASURE_H
#define SHMBUS_PYTHON_MEASURE_H

#include "python/binding.h"

bool py_measure_add_functions(PyObject *module);

#endif
