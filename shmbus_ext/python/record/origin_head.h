/* OriginHead: what a relay knows of a record that lies elsewhere, and heads as bytes. */
#ifndef SHMBUS_PYTHON_ORIGIN_HEAD_H
#define SHMBUS_PYTHON_ORIGIN_HEAD_H

#include "python/binding.h"

typedef struct {
    PyObject_HEAD
    PyObject *origin; /* bytes, as ring/origin.h has them */
    PyObject *instance_id;
    PyObject *key;
    PyObject *reason; /* why its sample failed: str; None of a sample */
    int64_t round;
    int64_t policy_version;
    int64_t made_ns;
    int64_t clock_ns;
    uint64_t nbytes;
    double score;
    uint32_t check;
    uint16_t group_size, need, index;
} OriginHeadObject;
extern PyTypeObject OriginHeadType;

bool py_origin_head_add_functions(PyObject *module);

#endif
