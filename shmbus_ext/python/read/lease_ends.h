/* How the leases of a daemon's client end: methods of Borrower. */
#ifndef SHMBUS_PYTHON_LEASE_ENDS_H
#define SHMBUS_PYTHON_LEASE_ENDS_H

#include "python/binding.h"
#include "python/read/borrower_state.h"

PyObject *py_borrower_end(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_end_groups(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_give_back_group(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_give_back_ready(BorrowerObject *self, PyObject *all);
/* The daemon has released these: those that have ended are forgotten. A group that was given back is
 * confirmed, too, and is not known any more. False with an exception. */
bool py_borrower_confirm_all(BorrowerObject *self, PyObject *all, PyObject *numbers);
PyObject *py_borrower_confirm(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_forget(BorrowerObject *self, PyObject *leases);

#endif
