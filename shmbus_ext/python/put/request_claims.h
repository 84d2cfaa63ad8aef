/* Methods of Writer about the samples that it takes from the request lane. */
#ifndef SHMBUS_PYTHON_REQUEST_CLAIMS_H
#define SHMBUS_PYTHON_REQUEST_CLAIMS_H

#include "python/put/claim_room.h"

PyObject *py_writer_take_requests(WriterObject *self, PyObject *args);
PyObject *py_writer_give_back_request(WriterObject *self, PyObject *claim);
PyObject *py_writer_holds_request(WriterObject *self, PyObject *claim);
PyObject *py_writer_recover_dead(WriterObject *self, PyObject *ignored);
/* From a tuple that take_requests gave; false with an exception. */
bool py_take_claim(const WriterObject *self, PyObject *object, struct request_claim *claim);

#endif
