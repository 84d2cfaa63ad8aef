/* Arrays of the caller's: checked before anything is read or written through them. */
#ifndef SHMBUS_PYTHON_ARRAYS_H
#define SHMBUS_PYTHON_ARRAYS_H

#include "python/binding.h"

/* Elements of an array; 0 of anything else, which py_check_array refuses. */
uint64_t py_array_elements(PyObject *object);
/* Whether it is a contiguous array of one dimension, of a numpy type and so many elements: then
 * where its data is; false with an exception that names it. */
bool py_check_array(PyObject *object, const char *name, int type, uint64_t length, bool writeable,
                    void *data);
bool py_arrays_add_functions(PyObject *module);

#endif
