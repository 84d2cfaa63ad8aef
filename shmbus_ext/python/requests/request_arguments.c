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

bool py_take_epoch(PyObject *object, int64_t *epoch) {
    if (object == Py_None) {
        *epoch = SHMBUS_NO_EPOCH;
        return true;
    }
    *epoch = PyLong_AsLongLong(object);
    return *epoch != -1 || !PyErr_Occurred();
}
