/* How the leases of a daemon's client end: methods of Borrower. */
#ifndef SHMBUS_PYTHON_LEASE_ENDS_H
#define SHMBUS_PYTHON_LEASE_ENDS_H

#include "python/read/borrower_state.h"

PyObject *py_borrower_end(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_end_groups(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_give_back_group(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_give_back_ready(BorrowerObject *self, PyObject *all);
PyObject *py_borrower_confirm(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_forget(BorrowerObject *self, PyObject *leases);

#endif
