/* A consumer for Python: reading the ring, taking groups, ending leases, borrowing from a
 * daemon. */
#pragma once

#include "python/binding.h"
#include "python/group/group.h"
#include "python/record/record.h"
#include "python/segment/segment.h"
#include "ring/reader.h"

/* ---- Borrower: makes the trajectories of groups leased by a daemon to this process. */
extern PyTypeObject BorrowerType;

/* ---- ConsumerBase: the hot path of shmbus.Consumer. */
extern PyTypeObject ConsumerBaseType;

/* ---- Reader: the ring access of shmbus.Consumer. */
typedef struct {
    HOLDER_HEAD
    struct reader c;
    bool cut_short;   /* memory ran out between ring and stash: the stash may be torn */
    bool wakes_often; /* the last sleep was short: producers work right now */
} ReaderObject;
extern PyTypeObject ReaderType;

/* True if usable in this process; sets no exception. */
bool py_reader_is_open(const ReaderObject *self);
/* Likewise, with an exception. */
bool py_reader_usable(ReaderObject *self);
/* Likewise, and also false after a loss between ring and stash. */
bool py_reader_can_read(ReaderObject *self);
/* Record an exception between ring and stash: after a MemoryError the reader reads no more. */
void py_reader_note_failure(ReaderObject *self);
/* Read up to `limit` records into the table; refused records go to `left`. -1 with an exception. */
Py_ssize_t py_reader_poll_records(ReaderObject *self, GroupTableObject *table, Py_ssize_t limit,
                                  double now_s, PyObject *left);
/* Publish the time of the last look at the ring. */
void py_reader_note_seen(ReaderObject *self, uint64_t now_ns);
enum wait_result { WAIT_FAILED = -1, WAIT_OVER = 0, WAIT_WOKEN = 1 };
/* Sleep until records may have come, at most timeout_s; WAIT_FAILED with an exception. While
 * records come within awake_ns of each other, poll instead of sleeping, for at most awake_ns. */
enum wait_result py_reader_wait_for_events(ReaderObject *self, double timeout_s, uint64_t awake_ns);
/* Publish this consumer's counts for other processes. */
void py_reader_note_table(ReaderObject *self, const GroupTableObject *table);

/* ---- RecursiveLock: a recursive lock; C takes a free lock without a call. */
typedef struct {
    PyObject_HEAD
    PyThread_type_lock gate;
    unsigned long owner; /* a thread, unless depth is 0 */
    unsigned int depth;
    unsigned int waiting;
    uint32_t generation; /* fork generation of this process at creation or renewal */
} RecursiveLockObject;
extern PyTypeObject RecursiveLockType, LockAttemptType;

/* Wait while a second thread holds the lock; false with a signal handler's exception. */
bool py_recursive_lock_acquire(RecursiveLockObject *self);
void py_recursive_lock_release(RecursiveLockObject *self);

/* ---- Intake: from the ring to a list of groups under lease. */
extern PyTypeObject IntakeType;

/* Registered by module.c. */
extern PyMethodDef py_end_lease_functions[];
