/* Producer.put_many, and what closing does to one that is under way in another thread. */
#ifndef SHMBUS_PYTHON_PUT_MANY_H
#define SHMBUS_PYTHON_PUT_MANY_H

#include "python/put/claim_room.h"

extern const char py_writer_put_many_doc[];
/* put_many(items, *, timeout=None) -> int */
PyObject *py_writer_put_many(WriterObject *self, PyObject *args, PyObject *kwargs);
/* Aborts what is reserved and not committed, of all put_many's under way. */
void py_writer_abort_batches(WriterObject *self);

#endif
