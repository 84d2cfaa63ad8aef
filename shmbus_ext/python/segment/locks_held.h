/* What other processes hold of a segment's locks of extents. */
#ifndef SHMBUS_PYTHON_LOCKS_HELD_H
#define SHMBUS_PYTHON_LOCKS_HELD_H

#include "python/binding.h"
#include "ring/segment.h"

/* A list of (first, count): what others hold of the views' locks of extents (kind 0), or of one
 * client's leases (kind 1 + client). */
PyObject *py_locks_held(const struct segment *segment, unsigned int kind);

#endif
