/* Arguments that the functions of this room share. */
#ifndef SHMBUS_PYTHON_REQUEST_ARGUMENTS_H
#define SHMBUS_PYTHON_REQUEST_ARGUMENTS_H

#include "python/segment/segment_object.h"

/* A segment that may be used; false with an exception. */
bool py_take_segment(PyObject *object, SegmentObject **segment);
/* None, or an int of 64 bits; false with an exception. */
bool py_take_round(PyObject *object, int64_t *round);

#endif
