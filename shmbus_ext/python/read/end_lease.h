/* Methods of Reader that end leases. */
#ifndef SHMBUS_PYTHON_READ_END_LEASE_H
#define SHMBUS_PYTHON_READ_END_LEASE_H

#include "python/read/reader_object.h"

PyObject *py_reader_release(ReaderObject *self, PyObject *args);
PyObject *py_reader_end_groups(ReaderObject *self, PyObject *args);
PyObject *py_reader_give_back_group(ReaderObject *self, PyObject *args);

#endif
