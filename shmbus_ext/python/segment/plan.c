/* The sizes of a segment that is not made yet, for whoever decides whether to make it. */
#include "python/segment/plan.h"

#include "ring/segment.h"

/* segment_plan(capacity, max_producers, extent_bytes) ->
 * (segment bytes, bytes of an extent, extents, producers that get one each), or None where no
 * segment can be laid out. */
static PyObject *py_segment_plan(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long capacity, extent_bytes;
    unsigned int max_producers;
    struct segment_geometry plan;
    if (!PyArg_ParseTuple(args, "KIK", &capacity, &max_producers, &extent_bytes)) {
        return NULL;
    }
    if (!segment_plan(capacity, max_producers, extent_bytes, &plan)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(KKII)", (unsigned long long)plan.segment_bytes,
                         (unsigned long long)plan.extent_bytes, plan.extent_count,
                         plan.extent_count - reserved_extents(plan.extent_count));
}

static PyMethodDef functions[] = {
    {"segment_plan", py_segment_plan, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_plan_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
