/* A consumer for Python: reading the ring, taking groups, ending leases, and what a daemon lends. */
#ifndef SHMBUS_PYTHON_READ_READ_H
#define SHMBUS_PYTHON_READ_READ_H

#include "python/binding.h"
#include "python/group/group.h"
#include "python/record/record.h"
#include "python/segment/segment.h"
#include "ring/reader.h"

/* ---- Borrower: makes the trajectories of groups that a daemon leased to this process. */
extern PyTypeObject BorrowerType;

/* ---- ConsumerBase: the part of shmbus.Consumer that is called most. */
extern PyTypeObject ConsumerBaseType;
bool py_take_add_words(void);

/* ---- Reader: what shmbus.Consumer reads the ring with. */
typedef struct {
    HOLDER_HEAD
    struct reader c;
    bool cut_short;   /* memory failed between the ring and the stash: what that has may be torn */
    bool wakes_often; /* the last sleep was short: producers are at work */
} ReaderObject;
extern PyTypeObject ReaderType;

/* Whether the reader can be used in this process; sets no exception. */
bool py_reader_is_open(const ReaderObject *self);
/* The same, with an exception. */
bool py_reader_usable(ReaderObject *self);
/* The same, and that nothing was lost between the ring and the stash. */
bool py_reader_can_read(ReaderObject *self);
/* Of an exception that has come between the two: after a MemoryError nothing more is read. */
void py_reader_note_failure(ReaderObject *self);
/* Up to `limit` records into the table; what it refuses goes to `left`. -1 with an exception. */
Py_ssize_t py_reader_poll_records(ReaderObject *self, GroupTableObject *table, Py_ssize_t limit,
                                  double now_s, PyObject *left);
/* Notes when the ring was read last, for others. */
void py_reader_note_seen(ReaderObject *self, uint64_t now_ns);
enum wait_result { WAIT_FAILED = -1, WAIT_OVER = 0, WAIT_WOKEN = 1 };
/* Sleeps until records may have come, at most timeout_s; WAIT_FAILED with an exception. While they
 * come within awake_ns of each other, it looks without sleeping, for at most that much longer. */
enum wait_result py_reader_wait_for_events(ReaderObject *self, double timeout_s, uint64_t awake_ns);
/* Writes what others can read of this consumer. */
void py_reader_note_table(ReaderObject *self, const GroupTableObject *table);

/* ---- RecursiveLock: a recursive lock that C takes without a call where it is free. */
typedef struct {
    PyObject_HEAD
    PyThread_type_lock gate;
    unsigned long owner; /* a thread, while depth is not 0 */
    unsigned int depth;
    unsigned int waiting;
    uint32_t generation; /* of this process's forks, when it was made or made new */
} RecursiveLockObject;
extern PyTypeObject RecursiveLockType, LockAttemptType;

/* Waits while another thread has it; false with an exception, of a signal's handler. */
bool py_recursive_lock_acquire(RecursiveLockObject *self);
void py_recursive_lock_release(RecursiveLockObject *self);

/* ---- Intake, which takes from the ring to a list of groups under lease. */
extern PyTypeObject IntakeType;

/* What module.c adds. */
extern PyMethodDef py_end_lease_functions[];

#endif
