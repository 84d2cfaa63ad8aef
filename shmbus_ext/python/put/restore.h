/* Restorer: writes what a snapshot holds into a new segment. */
#ifndef SHMBUS_PYTHON_RESTORE_H
#define SHMBUS_PYTHON_RESTORE_H

#include "python/binding.h"

extern PyTypeObject RestorerType;

#endif
