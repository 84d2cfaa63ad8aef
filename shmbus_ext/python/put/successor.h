/* A producer whose bus was removed, and that goes on in the next one of that name. */
#ifndef SHMBUS_PYTHON_SUCCESSOR_H
#define SHMBUS_PYTHON_SUCCESSOR_H

#include "python/put/claim_room.h"

/* _follow(): it goes on in the bus that `_successor` of its subclass opens. */
PyObject *py_writer_follow(WriterObject *self, PyObject *ignored);
/* _go_on(timeout_s): py_writer_go_on, where the bus was removed. */
PyObject *py_writer_go_on_call(WriterObject *self, PyObject *timeout);

#endif
