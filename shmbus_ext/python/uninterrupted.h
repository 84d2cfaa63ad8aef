/* Calls Python code that no signal's handler can interrupt. */
#ifndef SHMBUS_PYTHON_UNINTERRUPTED_H
#define SHMBUS_PYTHON_UNINTERRUPTED_H

#include "python/binding.h"

/* What callable(*arguments) returns, or raises. In the main thread it runs in another one, so it must
 * not ask for a lock that the caller holds. Steals nothing. */
PyObject *py_call_uninterrupted(PyObject *callable, PyObject *arguments);

extern PyMethodDef py_uninterrupted_functions[];

/* ---- ClosedByBlock: the end of a `with` block calls `close()`, and no signal's handler comes between. */
extern PyTypeObject ClosedByBlockType;
bool py_closing_init(void);

#endif
