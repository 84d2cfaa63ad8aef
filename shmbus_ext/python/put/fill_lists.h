/* The quick way from lists into a record: exact ints and floats, in one pass, into the ring. */
#ifndef SHMBUS_PYTHON_FILL_LISTS_H
#define SHMBUS_PYTHON_FILL_LISTS_H

#include "python/binding.h"
#include "batch/element.h"

/* Writes a nested list or tuple of these sizes, or one number where ndim is 0, to `to`. False, and
 * no exception, where anything in it is not plain: another size, another type, out of range. */
bool py_fill_list(uint8_t *to, enum stored_kind kind, PyObject *value, int ndim,
                  const uint64_t *sizes);

#endif
