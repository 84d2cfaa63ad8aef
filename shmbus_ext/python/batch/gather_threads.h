/* GatherThreads: the threads that copy batches, for Python. */
#ifndef SHMBUS_PYTHON_GATHER_THREADS_H
#define SHMBUS_PYTHON_GATHER_THREADS_H

#include "batch/threads.h"
#include "python/binding.h"

extern PyTypeObject GatherThreadsType;

/* Whether it is a GatherThreads or None; false with an exception. */
bool py_gather_threads_check(PyObject *object);
/* Its helpers, which do not end before py_gather_threads_finish; NULL, for the caller alone, of None
 * and of one that is closed. False with an exception where they cannot be started, which the first
 * call does. Both are called with the interpreter lock. */
bool py_gather_threads_begin(PyObject *object, struct threads **threads);
void py_gather_threads_finish(PyObject *object);

bool py_gather_threads_add_constants(PyObject *module);

#endif
