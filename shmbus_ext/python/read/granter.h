/* Granter: grants complete groups to the one request that a daemon has waiting. */
#ifndef SHMBUS_PYTHON_GRANTER_H
#define SHMBUS_PYTHON_GRANTER_H

#include "python/binding.h"

extern PyTypeObject GranterType;

#endif
