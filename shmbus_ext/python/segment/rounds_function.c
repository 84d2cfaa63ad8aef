/* next_round, for shmbus.Producer. */
#include "python/segment/rounds_function.h"

#include "python/segment/segment_object.h"
#include "ring/rounds.h"

/* next_round(segment): a number that this bus has handed out to nobody else. */
static PyObject *py_next_round(PyObject *module, PyObject *object) {
    (void)module;
    if (!PyObject_TypeCheck(object, &SegmentType)) {
        PyErr_SetString(PyExc_TypeError, "expected a Segment");
        return NULL;
    }
    SegmentObject *segment = (SegmentObject *)object;
    if (!py_segment_usable(segment, "handle")) {
        return NULL;
    }
    if (segment->c.read_only) {
        PyErr_Format(PyExc_TypeError, "bus '%U' is mapped read-only here", segment->name);
        return NULL;
    }
    return PyLong_FromLongLong(shmbus_next_round(segment->c.header));
}

static PyMethodDef functions[] = {
    {"next_round", py_next_round, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_rounds_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
