/* All segments of this process, and what a fork does to them. */
#ifndef SHMBUS_PYTHON_PRIVATE_COPIES_H
#define SHMBUS_PYTHON_PRIVATE_COPIES_H

#include "python/binding.h"

extern SegmentObject *all_segments;
bool py_segment_init_fork(void);

#endif
