/* Methods of Writer about the samples that it has begun, and how a sample is called in the table. */
#ifndef SHMBUS_PYTHON_BEGUN_SAMPLES_H
#define SHMBUS_PYTHON_BEGUN_SAMPLES_H

#include "python/put/claim_room.h"

PyObject *py_writer_begin(WriterObject *self, PyObject *args);
PyObject *py_writer_leave_begun(WriterObject *self, PyObject *args);

bool py_begun_add_functions(PyObject *module);

#endif
