/* The bound on how far producers are ahead, for the collector and for messages. */
#ifndef SHMBUS_PYTHON_LEAD_FUNCTIONS_H
#define SHMBUS_PYTHON_LEAD_FUNCTIONS_H

#include "python/binding.h"

bool py_lead_add_functions(PyObject *module);

#endif
