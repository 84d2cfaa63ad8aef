/* What the group table asks of a sample. */
#ifndef SHMBUS_PYTHON_ARRIVAL_H
#define SHMBUS_PYTHON_ARRIVAL_H

#include "python/group/group_lists.h"

/* What one sample says of itself; the strings are borrowed from it. */
struct arrival {
    PyObject *sample;
    PyObject *key; /* owned */
    struct group_key at;
    uint32_t width;
    uint32_t need;
    uint32_t cell;
    uint64_t nbytes;
    bool failed;
    bool leased; /* by an earlier collector, in a group without all of its samples */
};

/* False with an exception; then there is no key to let go. */
bool py_arrival_read(struct arrival *to, PyObject *sample, bool count_bytes);
/* A key is a str, or (str, int), or (str, int or None, number of the split). */
bool py_key_read(struct group_key *at, PyObject *key);
PyObject *py_key_of(PyObject *sample);
/* The ring bytes of a list of samples; false with an exception. */
bool py_sum_bytes(PyObject *samples, uint64_t *total);
bool py_arrival_init(void);

#endif
