/* What the segment says of deliveries, counted where groups are leased. */
#ifndef SHMBUS_PYTHON_DELIVERY_H
#define SHMBUS_PYTHON_DELIVERY_H

#include "python/record/trajectory.h"

/* Counts leased entries that were never leased before; anything else in the list is passed over. */
void py_delivery_count(SegmentObject *segment, PyObject *entries);
bool py_delivery_add_functions(PyObject *module);

#endif
