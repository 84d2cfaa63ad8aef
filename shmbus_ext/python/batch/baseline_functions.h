/* Baselines for Python: rules as tuples, and whole batches of groups. */
#ifndef SHMBUS_PYTHON_BASELINE_FUNCTIONS_H
#define SHMBUS_PYTHON_BASELINE_FUNCTIONS_H

#include "batch/baseline.h"
#include "python/binding.h"

/* What (kind, bessel, eps) says; false with an exception. */
bool py_baseline_of_tuple(PyObject *tuple, struct baseline *rule);
bool py_baseline_add_functions(PyObject *module);

#endif
