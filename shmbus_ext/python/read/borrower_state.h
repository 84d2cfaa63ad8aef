/* What a Borrower keeps: the locks of its leases and views, and the leases that are ready. */
#ifndef SHMBUS_PYTHON_BORROWER_STATE_H
#define SHMBUS_PYTHON_BORROWER_STATE_H

#include "python/group/client_lease.h"

typedef struct {
    HOLDER_HEAD
    uint32_t client;
    uint32_t *lease_counts; /* groups' records, by extent */
    uint32_t *view_counts;  /* pins and copies under way, by extent */
    uint32_t *changed;      /* extents that the kernel is to hear of, within one call */
    PyObject *ready;        /* list: received and not handed out, the next first */
    Py_ssize_t unconfirmed; /* leases that have ended here, and are locked still */
    struct record_copy copy;
} BorrowerObject;

/* Whether it can be used in this process; false with an exception. */
bool py_borrower_usable(BorrowerObject *self);

/* The view locks of records; hold and let_go of its holder_kind. */
bool py_borrower_hold_views(HolderObject *holder, const struct record_ref *refs, Py_ssize_t count);
void py_borrower_let_go_of_views(HolderObject *holder, const struct record_ref *refs,
                                 Py_ssize_t count);

/* Takes the locks of all leases of a list; false with an exception, and none. */
bool py_borrower_lock(BorrowerObject *self, PyObject *leases);
/* Drops the locks of leases that have ended for good, or that were not delivered. */
void py_borrower_unlock(BorrowerObject *self, PyObject *leases);
/* Moves all lease locks to another client's number; false with an exception, and as before. */
bool py_borrower_move_locks(BorrowerObject *self, uint32_t client);

/* Puts a lease into the dictionary of all, which is by number, or takes it out. */
bool py_borrower_note(PyObject *all, ClientLeaseObject *lease, bool known);
/* The next that is ready, out of the list; NULL, without an exception, if none is. */
ClientLeaseObject *py_borrower_pop_ready(BorrowerObject *self);
/* A lease that was handed out and did not reach its caller is ready again, as the next; one that is
 * not held stays as it is. The exception that is set stays. take_back of its holder_kind. */
void py_borrower_take_back(HolderObject *holder, PyObject *lease);

#endif
