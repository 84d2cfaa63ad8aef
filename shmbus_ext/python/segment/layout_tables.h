/* The segment's layout as data: what shmbus.inspect reads a file by. */
#ifndef SHMBUS_PYTHON_LAYOUT_TABLES_H
#define SHMBUS_PYTHON_LAYOUT_TABLES_H

#include "python/binding.h"

/* layout() -> {struct: {"names", "formats", "offsets", "itemsize"}}: what numpy.dtype takes. */
PyObject *py_layout(PyObject *module, PyObject *ignored);

#endif
