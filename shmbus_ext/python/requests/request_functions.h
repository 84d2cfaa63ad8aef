/* The request lane: what feeders offer, and what the collector and operators see. */
#ifndef SHMBUS_PYTHON_REQUEST_FUNCTIONS_H
#define SHMBUS_PYTHON_REQUEST_FUNCTIONS_H

#include "python/segment/segment_object.h"

/* What a row says, as request_text returns it; None where the request has ended. */
PyObject *py_describe_request(SegmentObject *segment, uint32_t row, uint64_t number);

bool py_request_add_functions(PyObject *module);

#endif
