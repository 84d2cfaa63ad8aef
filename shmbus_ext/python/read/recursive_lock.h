/* RecursiveLock: a recursive lock that C takes without a call where it is free. */
#ifndef SHMBUS_PYTHON_RECURSIVE_LOCK_H
#define SHMBUS_PYTHON_RECURSIVE_LOCK_H

#include "python/binding.h"

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

#endif
