/* See request_arguments.h. */
#include "python/requests/request_arguments.h"

bool py_take_segment(PyObject *object, SegmentObject **segment) {
    if (!PyObject_TypeCheck(object, &SegmentType)) {
        PyErr_SetString(PyExc_TypeError, "expected a Segment");
        return false;
    }
    *segment = (SegmentObject *)object;
    return py_segment_usable(*segment, "handle");
}

bool py_take_round(PyObject *object, int64_t *round) {
    if (object == Py_None) {
        *round = SHMBUS_NO_ROUND;
        return true;
    }
    *round = PyLong_AsLongLong(object);
    return *round != -1 || !PyErr_Occurred();
}
