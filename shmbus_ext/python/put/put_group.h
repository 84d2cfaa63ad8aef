/* Producer.put_group: all records of a group, committed by one store. */
#ifndef SHMBUS_PYTHON_PUT_GROUP_H
#define SHMBUS_PYTHON_PUT_GROUP_H

#include "python/put/claim_room.h"

/* _put_group(items: list of dicts of put's arguments, timeout): all of them or none, also where the
 * process is killed. */
PyObject *py_writer_put_group(WriterObject *self, PyObject *args);
/* cancelled(instance_id, *, round, split) -> bool */
PyObject *py_writer_cancelled(WriterObject *self, PyObject *args, PyObject *kwargs);
extern const char py_writer_cancelled_doc[];

#endif
