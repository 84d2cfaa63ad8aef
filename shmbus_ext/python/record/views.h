/* What stands behind arrays of the ring: a Keeper behind writable ones, a Pin behind those that
 * are read. */
#ifndef SHMBUS_PYTHON_VIEWS_H
#define SHMBUS_PYTHON_VIEWS_H

#include "python/record/holder.h"
#include "ring/writer.h"

/* The exporter behind the writable views of one reservation. */
typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    struct reservation at;
    struct view view;
    bool pinned; /* kept out of everybody's way until the last view is gone */
} KeeperObject;
extern PyTypeObject KeeperType;
KeeperObject *py_keeper_new(SegmentObject *segment, const struct reservation *at);

/* What holds a record's space while arrays look at it. */
typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    HolderObject *holder; /* NULL once that is closed */
    struct view view;
} PinObject;
extern PyTypeObject PinType;
/* Where a trajectory holds its space from its birth, the pin takes that over. */
PinObject *py_pin_new(HolderObject *holder, const struct record_ref *ref);

#endif
