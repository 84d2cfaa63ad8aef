/* The layout of the request lane for tools that read a bus's file without mapping it. */
#ifndef SHMBUS_PYTHON_REQUEST_LAYOUT_H
#define SHMBUS_PYTHON_REQUEST_LAYOUT_H

#include "python/binding.h"

bool py_request_layout_add_functions(PyObject *module);

#endif
