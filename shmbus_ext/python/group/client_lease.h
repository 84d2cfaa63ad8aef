/* ClientLease: one group that a daemon leased to this process; how its places travel. */
#ifndef SHMBUS_PYTHON_CLIENT_LEASE_H
#define SHMBUS_PYTHON_CLIENT_LEASE_H

#include "python/record/trajectory.h"

/* In place of a reason: the lease has not ended. */
#define LEASE_HELD (-1)

/* How a place travels from the daemon to a client: native numbers, one host. */
struct wire_place {
    uint32_t extent;
    uint32_t generation;
    uint64_t offset;
    uint64_t bytes;
};

typedef struct {
    PyObject_VAR_HEAD
    HolderObject *borrower;
    PyObject *key;     /* NULL, as the samples, until they have been read */
    PyObject *samples; /* list, by index */
    long long number;  /* the daemon's; another one's after it has been claimed */
    long long step;    /* of the ranks; -1 without */
    unsigned int size; /* samples of a complete group */
    int reason;        /* how it was ended here; LEASE_HELD until then */
    bool lost;         /* the next daemon knows nothing of it */
    bool locked;       /* its records count in their extents' lease locks */
    struct record_ref refs[];
} ClientLeaseObject;
extern PyTypeObject ClientLeaseType;

static inline Py_ssize_t py_client_lease_records(const ClientLeaseObject *self) {
    return Py_SIZE(self);
}

/* Of what a message grants, read no further than its places; NULL with an exception, or without one
 * where they do not lie in this segment. */
ClientLeaseObject *py_client_lease_new(HolderObject *borrower, PyObject *granted, long long step);
bool py_client_lease_add_functions(PyObject *module);

#endif
