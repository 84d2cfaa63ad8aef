/* How what a daemon grants becomes leases of this process: methods of Borrower. */
#ifndef SHMBUS_PYTHON_RECEIVE_LEASES_H
#define SHMBUS_PYTHON_RECEIVE_LEASES_H

#include "python/binding.h"
#include "python/read/borrower_state.h"

PyObject *py_borrower_borrow(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_receive(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_look(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_receive_reply(BorrowerObject *self, PyObject *args);

#endif
