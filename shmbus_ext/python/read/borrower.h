/* What borrower.c (locks, and what is received) and lease_ends.c (how a lease ends) share. */
#ifndef SHMBUS_PYTHON_BORROWER_H
#define SHMBUS_PYTHON_BORROWER_H

#include "python/group/client_lease.h"

typedef struct {
    HOLDER_HEAD
    uint32_t client;
    uint32_t *leases;  /* groups' records, by extent */
    uint32_t *views;   /* pins and copies under way, by extent */
    uint32_t *changed; /* extents that the kernel is to hear of, within one call */
    PyObject *ready;   /* list: received and not handed out, the next first */
    Py_ssize_t unconfirmed; /* leases that have ended here, and are locked still */
    struct record_copy copy;
} BorrowerObject;

/* Whether it can be used in this process; false with an exception. */
bool py_borrower_usable(BorrowerObject *self);
/* Drops the locks of leases that have ended for good, or that nobody was given. */
void py_borrower_unlock(BorrowerObject *self, PyObject *loans);
/* Puts a lease into the dictionary of all, which is by number, or takes it out. */
bool py_borrower_note(PyObject *leases, ClientLeaseObject *loan, bool known);
/* The next that is ready, out of the list; NULL, without an exception, where there is none. */
ClientLeaseObject *py_borrower_pop_ready(BorrowerObject *self);

/* The methods of Borrower by which a lease ends. */
PyObject *py_borrower_end(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_end_groups(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_give_back_group(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_give_back_ready(BorrowerObject *self, PyObject *leases);
PyObject *py_borrower_confirm(BorrowerObject *self, PyObject *args);
PyObject *py_borrower_forget(BorrowerObject *self, PyObject *loans);

#endif
