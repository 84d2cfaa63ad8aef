/* What a reservation is to have room for: its arguments and fields, checked and planned. */
#ifndef SHMBUS_PYTHON_PLAN_RESERVATION_H
#define SHMBUS_PYTHON_PLAN_RESERVATION_H

#include "python/put/claim_room.h"

struct field_list {
    PyObject *names;  /* tuple of str */
    PyObject *dtypes; /* tuple of dtype */
    PyObject *shapes; /* tuple of tuple of int */
};

/* All that can be refused before anything is taken from the ring; false with an exception. */
bool py_plan_reservation(WriterObject *self, struct put_arguments *arguments, PyObject *head,
                         const struct field_list *fields, uint64_t meta_room);

/* Whether the schema has the fields so; false with an exception. `shape` has for each field a word
 * that does not count, and its sizes. */
bool py_check_declared(const DeclaredSchemaObject *declared, PyObject *const *names,
                       PyArray_Descr *const *dtypes, uint32_t count, const uint8_t *ndim,
                       const uint64_t *shape);

#endif
