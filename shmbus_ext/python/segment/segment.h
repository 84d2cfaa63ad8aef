/* The segment for Python: one mapping of a bus, its tables, and data outliving a handle. */
#pragma once

#include "python/binding.h"
#include "python/list.h"
#include "ring/record.h"
#include "ring/segment.h"

/* ---- Other processes' locks on a segment's extents. */
/* [(first, count)] of other processes' locked extents: view locks (kind 0) or a client's lease
 * locks (kind 1 + client). */
PyObject *py_locks_held(const struct segment *segment, unsigned int kind);

/* ---- Records under views, copied into private memory at the views' addresses in place of the
 * ring: views outlive a fork, and their process's claim on the space. */
/* A record under arrays. */
struct view {
    struct list_link link;
    struct record_ref ref;
    bool writable; /* in the common mapping; otherwise in the mapping for views */
    /* Called at the close of the segment's handle. detached: the record was copied and needs no
     * lock. */
    void (*handle_closed)(struct view *view, bool detached);
};

/* Copy the writable, or the read-only, records of `views`; false without memory. */
bool py_copies_make(struct segment_copies *self, const struct segment *segment,
                    const struct list_link *views, bool writable);
/* Put the copies in place of the ring, in the same mapping; false on a kernel error. */
bool py_copies_replace(struct segment_copies *self, struct segment *segment, bool writable);
/* Fallback without memory for copies: the views' locks keep the space, like a borrower's, and every
 * other lock of this reader or borrower is dropped. If a view lock fails, too, every lock stays. */
void py_copies_lock_instead(const struct segment *segment, const struct list_link *views);

/* ---- Segment: one mapping of a bus, and the views keeping the mapping alive. */
/* Number of forks leading to this process. */
extern uint32_t fork_generation;

typedef struct {
    PyObject_HEAD
    struct segment c;
    PyObject *name;
    uint32_t generation; /* of the creating process */
    int pid;
    bool handle_closed;
    struct list_link views;  /* outstanding views */
    struct segment_copies read_at_fork, written_at_fork; /* of the views' records, during a fork */
    struct list_link of_all; /* this process's segments, for fork */
    PyObject *split_labels[SHMBUS_MAX_SPLITS]; /* labels seen so far; otherwise NULL */
} SegmentObject;
extern PyTypeObject SegmentType;

void py_segment_add_view(SegmentObject *self, struct view *view);
/* False with BusClosedError for a handle closed, or made before a fork in process `pid`. */
bool py_handle_usable(const char *noun, PyObject *name, const char *what, uint32_t generation,
                      int pid, bool closed);
bool py_segment_usable(SegmentObject *self, const char *what);
/* For O& of PyArg_ParseTuple: a usable Segment; a round or None (int64_t). */
int py_take_segment(PyObject *object, void *segment);
/* Likewise, for a segment writable in this process. */
int py_take_writable(PyObject *object, void *segment);
int py_take_round(PyObject *object, void *round);
/* Define a module function with one argument, a segment converted by `take`; its body follows. */
#define SEGMENT_FUNCTION(name, take)                                                             \
    static PyObject *name##_of(SegmentObject *segment);                                          \
    static PyObject *name(PyObject *Py_UNUSED(module), PyObject *object) {                       \
        SegmentObject *segment;                                                                  \
        return take(object, &segment) ? name##_of(segment) : NULL;                               \
    }                                                                                            \
    static PyObject *name##_of(SegmentObject *segment)
/* The number of a round, or None for SHMBUS_NO_ROUND. */
PyObject *py_round(int64_t round);
/* Raises BusRemovedError. */
void py_segment_raise_removed(SegmentObject *self);
/* Map the segment for views; false with an exception. */
bool py_segment_map_views(SegmentObject *self);
/* Give views private copies and close the file description, dropping its locks. */
void py_segment_release_handle(SegmentObject *self);
/* Call once, before making the first segment; false without memory. */
bool py_segment_init_fork(void);

/* ---- Splits by their labels, and a bus's lists for producers: rounds, cancelled groups. */
/* Check a split's label; false with an exception. */
bool py_split_check(PyObject *label);
/* The number of a checked label, added if necessary; SHMBUS_MAX_SPLITS with an exception. */
uint32_t py_split_number(SegmentObject *segment, PyObject *label);
/* The label of a number, or "#" and the number without a label; NULL with an exception. */
PyObject *py_split_label(SegmentObject *segment, uint32_t number);
/* Hash a key (str, round) or (str, round, split); false without an exception for other keys. */
bool py_key_hash(PyObject *key, uint64_t *hash);

/* ---- The request lane: offers of feeders, for workers, collector and operators. */
/* A row's contents in the form of request_text; None for an ended request. */
PyObject *py_describe_request(SegmentObject *segment, uint32_t row, uint64_t number);

/* Registered by module.c. */
extern PyMethodDef py_request_functions[];
extern PyMethodDef py_inspect_functions[];
extern PyMethodDef py_retry_functions[];
extern PyMethodDef py_splits_functions[];
