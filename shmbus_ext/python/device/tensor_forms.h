/* How tensors lie in their memory, by DLPack. */
#ifndef SHMBUS_PYTHON_TENSOR_FORMS_H
#define SHMBUS_PYTHON_TENSOR_FORMS_H

#include "python/binding.h"

bool py_tensor_forms_add_functions(PyObject *module);

#endif
