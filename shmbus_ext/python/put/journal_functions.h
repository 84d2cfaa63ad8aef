/* Functions of the module over a bus's relay journal. */
#ifndef SHMBUS_PYTHON_JOURNAL_FUNCTIONS_H
#define SHMBUS_PYTHON_JOURNAL_FUNCTIONS_H

#include "python/binding.h"

bool py_relay_add_functions(PyObject *module);

#endif
