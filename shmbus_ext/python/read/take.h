/* What consumer_base.c (take), take.c (from the ring to a lease), recursive_lock.c (its lock), and what
 * they call share. */
#ifndef SHMBUS_PYTHON_TAKE_H
#define SHMBUS_PYTHON_TAKE_H

#include "python/group/group_table_object.h"

typedef struct {
    PyObject_HEAD
    PyThread_type_lock gate;
    unsigned long owner; /* a thread, while depth is not 0 */
    unsigned int depth;
    unsigned int waiting;
    uint32_t generation; /* of this process's forks, when it was made or made new */
} RecursiveLockObject;

/* Waits while another thread has it; false with an exception, of a signal's handler. */
bool py_recursive_lock_acquire(RecursiveLockObject *self);
void py_recursive_lock_release(RecursiveLockObject *self);

/* What a caller of take asks for. */
struct wanted {
    PyObject *consumer;
    Py_ssize_t groups;
    double timeout_s; /* infinite for ever */
};

typedef struct intake IntakeObject;
/* Whether it can be used in this process; sets no exception. */
bool py_intake_is_open(const IntakeObject *self);
/* A list of groups, empty when the time is over; NULL with an exception. */
PyObject *py_intake_take(IntakeObject *self, const struct wanted *wanted);

/* Whether the reader can be used in this process; sets no exception. */
bool py_reader_is_open(const ReaderObject *self);
/* The same, with an exception. */
bool py_reader_usable(ReaderObject *self);
/* Up to `limit` records into the table; what it refuses, or leaves to be judged, is appended to
 * `left`. How many came, or -1 with an exception. */
Py_ssize_t py_reader_poll_records(ReaderObject *self, GroupTableObject *rows, Py_ssize_t limit,
                                  double now_s, PyObject *left);
/* Says that the ring was looked at. */
void py_reader_note_seen(ReaderObject *self, uint64_t now_ns);
/* Sleeps until something may have come: 1; 0 when the time is over, -1 with an exception. */
int py_reader_wait_for_events(ReaderObject *self, double timeout_s);
/* Writes what others can read of this consumer. */
void py_reader_note_table(ReaderObject *self, const GroupTableObject *rows);

/* What has been ready longest is under lease from then on: a list of at most `limit` rows. */
PyObject *py_group_lists_lease_ready(GroupTableObject *self, Py_ssize_t limit);

/* A group of a type that is made of GroupBase. */
PyObject *py_group_new(PyTypeObject *type, PyObject *consumer, PyObject *lease);
/* Its lease, borrowed, where it is a group that this consumer delivered and that is under lease by
 * its own account; NULL, without an exception, of anything else. */
PyObject *py_group_lease(PyObject *group, PyObject *consumer);
void py_group_set_state(PyObject *group, PyObject *state);

#endif
