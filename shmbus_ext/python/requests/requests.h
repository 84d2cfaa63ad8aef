/* The lane of requests for Python. */
#ifndef SHMBUS_PYTHON_REQUESTS_REQUESTS_H
#define SHMBUS_PYTHON_REQUESTS_REQUESTS_H

#include "python/binding.h"
#include "python/segment/segment.h"

/* ---- Arguments that the functions of this room share. */
/* A segment that may be used; false with an exception. */
bool py_take_segment(PyObject *object, SegmentObject **segment);
/* None, or an int of 64 bits; false with an exception. */
bool py_take_round(PyObject *object, int64_t *round);

/* ---- The request lane: what feeders offer, and what the collector and operators see. */
/* What a row says, as request_text returns it; None where the request has ended. */
PyObject *py_describe_request(SegmentObject *segment, uint32_t row, uint64_t number);

/* What module.c adds. */
bool py_request_add_functions(PyObject *module);

#endif
