/* Splits by their labels, and the lists of a bus that producers ask: rounds, cancelled groups. */
#ifndef SHMBUS_PYTHON_SPLIT_LABELS_H
#define SHMBUS_PYTHON_SPLIT_LABELS_H

#include "python/segment/segment_object.h"

/* Whether a label can be one; false with an exception. */
bool py_split_check(PyObject *label);
/* The number of a label that was checked, which gets one if it has none; SHMBUS_MAX_SPLITS with an
 * exception. */
uint32_t py_split_number(SegmentObject *segment, PyObject *label);
/* The label of a number, or "#" and the number where it has none; NULL with an exception. */
PyObject *py_split_label(SegmentObject *segment, uint32_t number);
/* Of a key with a round: (str, int) or (str, int, number of the split). False, without an
 * exception, where it is another. */
bool py_key_hash(PyObject *key, uint64_t *hash);

bool py_splits_add_functions(PyObject *module);

#endif
