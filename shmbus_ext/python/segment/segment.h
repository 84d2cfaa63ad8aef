/* The segment for Python: one mapping of a bus, its tables, and what outlives a handle. */
#ifndef SHMBUS_PYTHON_SEGMENT_SEGMENT_H
#define SHMBUS_PYTHON_SEGMENT_SEGMENT_H

#include "python/binding.h"
#include "python/list.h"
#include "ring/record.h"
#include "ring/segment.h"

/* ---- What other processes hold of a segment's locks of extents. */
/* [(first, count)]: others' locks of extents: views' (kind 0), or a client's leases (1 + it). */
PyObject *py_locks_held(const struct segment *segment, unsigned int kind);

/* ---- Records under views, copied into memory of this process, which takes the place of the ring at the
 * views' addresses: views outlive their process's claim on the space, and a fork. */
/* A record that arrays look at. */
struct view {
    struct list_link link;
    struct record_ref ref;
    bool writable; /* in the mapping that all else uses; else in the one for views */
    /* The segment's handle is closed. detached: the record has its copy, and no lock is needed. */
    void (*handle_closed)(struct view *view, bool detached);
};

/* Copies all records of `views` that are writable, or all that are not; false without memory. */
bool py_copies_make(struct segment_copies *self, const struct segment *segment,
                    const struct list_link *views, bool writable);
/* Puts them in place of the ring, in the same mapping; false where the kernel cannot. */
bool py_copies_replace(struct segment_copies *self, struct segment *segment, bool writable);
/* Without memory for copies: the views' locks keep the space, as a borrower's do, and nothing else
 * of this reader or borrower stays locked. Where view locks fail too, everything stays locked. */
void py_copies_lock_instead(const struct segment *segment, const struct list_link *views);

/* ---- Segment: one mapping of a bus, and the views that keep it mapped. */
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
/* For O& of PyArg_ParseTuple: a usable Segment; a round or None (int64_t). */
int py_take_segment(PyObject *object, void *segment);
/* The same, of one that this process may write. */
int py_take_writable(PyObject *object, void *segment);
int py_take_round(PyObject *object, void *round);
/* A function of the module with one argument, a segment that `take` gives; its body follows. */
#define SEGMENT_FUNCTION(name, take)                                                             \
    static PyObject *name##_of(SegmentObject *segment);                                          \
    static PyObject *name(PyObject *Py_UNUSED(module), PyObject *object) {                       \
        SegmentObject *segment;                                                                  \
        return take(object, &segment) ? name##_of(segment) : NULL;                               \
    }                                                                                            \
    static PyObject *name##_of(SegmentObject *segment)
/* The number of a round, or None where it is SHMBUS_NO_ROUND. */
PyObject *py_round(int64_t round);
/* Raises BusRemovedError. */
void py_segment_raise_removed(SegmentObject *self);
/* Maps the segment for views; false with an exception. */
bool py_segment_map_views(SegmentObject *self);
/* Gives views copies of their own and closes the file description: locks are dropped. */
void py_segment_release_handle(SegmentObject *self);
/* To be called once, before any segment is made; false where there is no memory. */
bool py_segment_init_fork(void);

/* ---- Splits by their labels, and the lists of a bus that producers ask: rounds, cancelled groups. */
/* Whether a label can be one; false with an exception. */
bool py_split_check(PyObject *label);
/* The number of a checked label, new if need be; SHMBUS_MAX_SPLITS with an exception. */
uint32_t py_split_number(SegmentObject *segment, PyObject *label);
/* The label of a number, or "#" and the number where it has none; NULL with an exception. */
PyObject *py_split_label(SegmentObject *segment, uint32_t number);
/* Of a key (str, round) or (str, round, split); false, without an exception, of another. */
bool py_key_hash(PyObject *key, uint64_t *hash);

/* ---- The request lane: what feeders offer, and what the collector and operators see. */
/* What a row says, as request_text returns it; None where the request has ended. */
PyObject *py_describe_request(SegmentObject *segment, uint32_t row, uint64_t number);

/* What module.c adds. */
extern PyMethodDef py_request_functions[];
extern const struct named_value py_request_constants[];
extern const struct named_value py_inspect_constants[];
extern PyMethodDef py_inspect_functions[];
bool py_inspect_add_objects(PyObject *module);
extern PyMethodDef py_retry_functions[];
extern const struct named_value py_retry_constants[];
extern const struct named_value py_splits_constants[];
extern PyMethodDef py_splits_functions[];
bool py_splits_add_objects(PyObject *module);

#endif
