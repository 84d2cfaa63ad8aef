/* Calls of a device's driver, by their addresses. */
#ifndef SHMBUS_PYTHON_DEVICE_CALLS_H
#define SHMBUS_PYTHON_DEVICE_CALLS_H

#include "python/binding.h"

bool py_device_add_functions(PyObject *module);

#endif
