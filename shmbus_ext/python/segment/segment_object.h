/* Segment: one mapping of a bus, and the views that keep it mapped. */
#ifndef SHMBUS_PYTHON_SEGMENT_OBJECT_H
#define SHMBUS_PYTHON_SEGMENT_OBJECT_H

#include "python/list.h"
#include "ring/record.h"
#include "ring/segment.h"

/* Counts the forks that led to this process. */
extern uint32_t fork_generation;

typedef struct {
    PyObject_HEAD
    struct segment c;
    PyObject *name;
    uint32_t generation; /* of the process that made it */
    int pid;
    bool handle_closed;
    struct list_link views;   /* that are out */
    struct list_link of_all;  /* segments of this process, for fork */
} SegmentObject;
extern PyTypeObject SegmentType;

/* A record that arrays look at. It has a copy of its own once the segment's handle is closed. */
struct view {
    struct list_link link;
    struct record_ref ref;
    /* The handle is closed. detached: every view has its copy, and the locks have gone. */
    void (*handle_closed)(struct view *view, bool detached);
};

void py_segment_add_view(SegmentObject *self, struct view *view);
/* Sets an exception when the handle is closed or was made before a fork. */
bool py_segment_usable(SegmentObject *self, const char *what);
/* Raises BusRemovedError. */
void py_segment_raise_removed(SegmentObject *self);
/* Whether the bus has a name still; false with BusRemovedError. A system call. */
bool py_segment_exists(SegmentObject *self);
/* Closes the file description: locks are dropped, the mapping stays for views. */
void py_segment_release_handle(SegmentObject *self);
/* To be called once, before any segment is made; false where there is no memory. */
bool py_segment_init_fork(void);

#endif
