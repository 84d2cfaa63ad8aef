/* What trajectories are made by: a Reader, or the Borrower of a process that a daemon serves. */
#ifndef SHMBUS_PYTHON_HOLDER_H
#define SHMBUS_PYTHON_HOLDER_H

#include "python/record/schema.h"
#include "python/segment/segment_object.h"

/* Groups arrive together: a small table keyed by checksum finds the string of the one before. */
#define ID_TABLE 4096u

struct holder_kind;
#define HOLDER_HEAD                                                                              \
    PyObject_HEAD SegmentObject *segment;                                                        \
    const struct holder_kind *kind;                                                              \
    PyObject **ids;    /* recently read instance ids, so that a group shares one string */       \
    PyObject *schemas; /* bytes -> Schema */                                                     \
    struct schema_object *last_schema;                                                           \
    uint64_t orphans; /* records read and neither released nor in anybody's hands */             \
    bool packs; /* has packed a batch of what it read */                                         \
    bool attached;

typedef struct {
    HOLDER_HEAD
} HolderObject;

/* How either keeps a record's space, beyond what a trajectory holds from its birth. */
struct holder_kind {
    bool counts; /* a trajectory holds its record's space from its birth */
    /* All of them, or false with an exception. */
    bool (*hold)(HolderObject *self, const struct record_ref *refs, Py_ssize_t count);
    void (*let_go)(HolderObject *self, const struct record_ref *refs, Py_ssize_t count);
    /* A ClientLease whose group died on its way to the caller; NULL where there are none. */
    void (*take_back)(HolderObject *self, PyObject *lease);
};
bool py_holder_init(HolderObject *self, SegmentObject *segment, const struct holder_kind *kind);
void py_holder_clear(HolderObject *self);
/* Notes that batches are packed of what it read, in the segment where it may write there. A
 * borrower may not: its client tells the daemon. */
void py_holder_note_packing(HolderObject *self);

#endif
