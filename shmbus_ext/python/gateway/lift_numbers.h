/* Lists of numbers out of a JSON object, as arrays. */
#ifndef SHMBUS_PYTHON_LIFT_NUMBERS_H
#define SHMBUS_PYTHON_LIFT_NUMBERS_H

#include "python/binding.h"

extern PyMethodDef py_lift_functions[];

#endif
