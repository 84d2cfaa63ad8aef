/* Methods of Trajectory that read all of its fields at once, and copy them out of the ring. */
#ifndef SHMBUS_PYTHON_COPIES_H
#define SHMBUS_PYTHON_COPIES_H

#include "python/record/trajectory.h"

/* Once the type is ready. */
bool py_copies_add_methods(PyObject *module);

#endif
