/* Batches: many trajectories gathered into arrays that the caller owns. */
#ifndef SHMBUS_PYTHON_PACK_H
#define SHMBUS_PYTHON_PACK_H

#include "python/binding.h"

bool py_pack_add_functions(PyObject *module);

#endif
