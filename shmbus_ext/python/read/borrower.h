/* Borrower: makes the trajectories of groups that a daemon leased to this process. */
#ifndef SHMBUS_PYTHON_BORROWER_H
#define SHMBUS_PYTHON_BORROWER_H

#include "python/binding.h"

extern PyTypeObject BorrowerType;

#endif
