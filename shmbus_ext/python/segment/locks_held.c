/* The search of locks_held.h: one question to the kernel for each lock that it finds.
 *
 * Invariant: it takes no lock, so whoever holds one is not disturbed. */
#include "python/segment/locks_held.h"

#include "base/file_lock.h"

PyObject *py_locks_held(const struct segment *segment, unsigned int kind) {
    if (kind > SHMBUS_MAX_CLIENTS) {
        PyErr_Format(PyExc_ValueError, "locks_held: kind %u out of range", kind);
        return NULL;
    }
    int64_t base = kind == 0 ? SHMBUS_LOCK_VIEW
                             : SHMBUS_LOCK_LEASE + (int64_t)(kind - 1) * SHMBUS_MAX_EXTENTS;
    int64_t end = base + SHMBUS_MAX_EXTENTS;
    PyObject *found = PyList_New(0);
    /* Ranges that are still to be searched: each lock that is found splits one into two. */
    int64_t(*todo)[2] = PyMem_Malloc(sizeof *todo * (SHMBUS_MAX_EXTENTS + 2));
    if (found == NULL || todo == NULL) {
        PyMem_Free(todo);
        Py_XDECREF(found);
        return PyErr_NoMemory();
    }
    size_t left = 0;
    todo[left][0] = base;
    todo[left++][1] = end;
    while (left > 0) {
        int64_t from = todo[--left][0], to = todo[left][1];
        int64_t start = from, bytes = to - from;
        if (bytes <= 0 || file_lock_find(segment->fd, &start, &bytes) != LOCK_HELD_ELSEWHERE) {
            continue;
        }
        int64_t last = bytes == 0 || start + bytes > to ? to : start + bytes;
        start = start < from ? from : start;
        PyObject *row = Py_BuildValue("(LL)", (long long)(start - base), (long long)(last - start));
        if (row == NULL || PyList_Append(found, row) < 0) {
            Py_XDECREF(row);
            Py_CLEAR(found);
            break;
        }
        Py_DECREF(row);
        if (left + 2 <= SHMBUS_MAX_EXTENTS + 2) {
            todo[left][0] = from;
            todo[left++][1] = start;
            todo[left][0] = last;
            todo[left++][1] = to;
        }
    }
    PyMem_Free(todo);
    return found;
}
