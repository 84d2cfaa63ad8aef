/* Segment: one mapping of a bus, and the views that keep it mapped. */
#ifndef SHMBUS_PYTHON_SEGMENT_OBJECT_H
#define SHMBUS_PYTHON_SEGMENT_OBJECT_H

#include "python/segment/private_copies.h"

/* Counts the forks that led to this process. */
extern uint32_t fork_generation;

typedef struct {
    PyObject_HEAD
    struct segment c;
    PyObject *name;
    uint32_t generation; /* of the process that made it */
    int pid;
    bool handle_closed;
    struct list_link views;  /* that are out */
    struct segment_copies read_at_fork, written_at_fork; /* of their records, during a fork */
    struct list_link of_all; /* segments of this process, for fork */
    PyObject *split_labels[SHMBUS_MAX_SPLITS]; /* that were met; NULL for the others */
} SegmentObject;
extern PyTypeObject SegmentType;

void py_segment_add_view(SegmentObject *self, struct view *view);
/* Sets an exception when the handle is closed or was made before a fork. */
bool py_segment_usable(SegmentObject *self, const char *what);
/* Raises BusRemovedError. */
void py_segment_raise_removed(SegmentObject *self);
/* Maps the segment for views; false with an exception. */
bool py_segment_map_views(SegmentObject *self);
/* Gives views copies of their own and closes the file description: locks are dropped. */
void py_segment_release_handle(SegmentObject *self);
/* To be called once, before any segment is made; false where there is no memory. */
bool py_segment_init_fork(void);

#endif
