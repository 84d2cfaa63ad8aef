/* What borrower.c (locks and leases of a daemon's client) and client_lease.c (one lease, and how places
 * and identities travel) share. */
#ifndef SHMBUS_PYTHON_CLIENT_LEASE_H
#define SHMBUS_PYTHON_CLIENT_LEASE_H

#include "python/binding.h"

#define LOAN_HELD (-1)

typedef struct {
    PyObject_VAR_HEAD
    HolderObject *borrower;
    PyObject *key;     /* NULL, as the samples, until they have been read */
    PyObject *samples; /* list, by index */
    long long number;  /* the daemon's; another one's after it has been claimed */
    long long step;    /* of the ranks; -1 without */
    unsigned int size; /* samples of a complete group */
    int reason;        /* how it was ended here; LOAN_HELD until then */
    bool lost;         /* the next daemon knows nothing of it */
    bool locked;       /* its records count in their extents' lease locks */
    struct record_ref refs[];
} ClientLeaseObject;

static inline Py_ssize_t py_client_lease_records(const ClientLeaseObject *self) {
    return Py_SIZE(self);
}

/* Of what a message grants, read no further than its places; NULL with an exception, or without one
 * where they do not lie in this segment. */
ClientLeaseObject *py_client_lease_new(HolderObject *borrower, PyObject *granted, long long step);
/* One that was handed out and that nobody has is ready again, as the next; of one that is not held,
 * nothing. The exception that is set stays. */
void py_borrower_return(ClientLeaseObject *loan);

#endif
