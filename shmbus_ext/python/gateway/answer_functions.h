/* gateway/last_byte.c for Python. */
#ifndef SHMBUS_PYTHON_ANSWER_FUNCTIONS_H
#define SHMBUS_PYTHON_ANSWER_FUNCTIONS_H

#include "python/binding.h"

bool py_answer_add_functions(PyObject *module);

#endif
