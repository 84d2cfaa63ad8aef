/* Take: from the ring to a list of groups under lease. Intake does it. */
#ifndef SHMBUS_PYTHON_TAKE_H
#define SHMBUS_PYTHON_TAKE_H

#include "python/binding.h"
#include "python/segment/segment.h"

struct take_request {
    PyObject *consumer;
    Py_ssize_t groups;
    double timeout_s; /* infinite for ever */
    uint32_t split;
};

extern PyTypeObject IntakeType;

/* A list of groups, empty when the time is over; NULL with an exception. */
PyObject *py_intake_take(PyObject *intake, const struct take_request *request);
/* The bus of an Intake, borrowed; NULL, without an exception, once it is closed. */
SegmentObject *py_intake_segment(PyObject *intake);

#endif
