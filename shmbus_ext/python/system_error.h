/* What the kernel refused, as an exception; named where all of shmbus needs what is missing. */
#ifndef SHMBUS_PYTHON_SYSTEM_ERROR_H
#define SHMBUS_PYTHON_SYSTEM_ERROR_H

#include "python/binding.h"

/* Raises OSError of errno for a file that is open: "bus", "pool" or "channel" is what `kind` calls
 * it. Returns NULL. */
PyObject *py_raise_system(const char *kind, PyObject *name);

#endif
