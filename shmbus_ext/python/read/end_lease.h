/* What ends leases of an embedded consumer in one step. */
#ifndef SHMBUS_PYTHON_END_LEASE_H
#define SHMBUS_PYTHON_END_LEASE_H

#include "python/binding.h"

bool py_end_lease_add_functions(PyObject *module);

#endif
