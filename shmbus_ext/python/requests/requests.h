/* The lane of requests for Python. */
#ifndef SHMBUS_PYTHON_REQUESTS_REQUESTS_H
#define SHMBUS_PYTHON_REQUESTS_REQUESTS_H

#include "python/binding.h"
#include "python/segment/segment.h"

/* ---- The request lane: what feeders offer, and what the collector and operators see. */
/* What a row says, as request_text returns it; None where the request has ended. */
PyObject *py_describe_request(SegmentObject *segment, uint32_t row, uint64_t number);

/* What module.c adds. */
extern PyMethodDef py_request_functions[];
extern const struct named_value py_request_constants[];

#endif
