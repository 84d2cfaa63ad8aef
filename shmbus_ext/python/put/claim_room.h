/* A producer's lane as an object, and room for a record in it: what put, put_many and reserve share. */
#ifndef SHMBUS_PYTHON_CLAIM_ROOM_H
#define SHMBUS_PYTHON_CLAIM_ROOM_H

#include "python/binding.h"

/* Waiting for space is cut into slices of this, for signals and a writer that is closed under it. */
#define SPACE_SLICE_NS INT64_C(100000000)

struct reservation_object;
struct batch;

typedef struct {
    PyObject_HEAD
    SegmentObject *segment;
    struct writer c;
    struct schema_cache schemas;
    struct reservation_object *open; /* reservations that are not ended */
    struct batch *batches;           /* put_many's under way, in whatever thread */
    uint64_t bytes;
    uint64_t full_waits;
    uint32_t flags;
    uint32_t busy;   /* threads that copy into this lane without the interpreter lock */
    PyObject *watch; /* called with the seconds waited, every watch_s of a wait for space */
    double watch_s;
    bool attached;
    bool closing;
    bool follows; /* goes on in the bus that takes the place of a removed one */
    bool moving;  /* a thread is about to take it there */
    /* Of the lane's counters, when this writer took it; less what it had counted elsewhere. */
    uint64_t committed_base, aborted_base;
    char label[SHMBUS_LABEL_BYTES];
} WriterObject;

/* Sets an exception when the writer is closed or was made before a fork. */
bool py_writer_usable(WriterObject *self);
/* A paused bus is a full one, to those who want to write. */
enum writer_status py_writer_try_claim(WriterObject *self, uint64_t bytes, struct reservation *at);
/* Room for a record, waiting for it as long as timeout_s allows, for ever where that is negative;
 * false with an exception. */
bool py_writer_claim_room(WriterObject *self, uint64_t bytes, double timeout_s,
                          struct reservation *at);
/* Lets the watchdog look at a wait that lasts; what it raises ends the wait. */
bool py_writer_watch_wait(const WriterObject *self, double waited_s, double *next_watch_s);
/* Frame and body of a record whose arguments are finished. */
void py_writer_write_head(WriterObject *self, const struct put_arguments *arguments,
                          const struct reservation *at);
/* Meta and arrays of a record that is reserved. Other threads run while a large one is copied. */
void py_writer_fill_reserved(WriterObject *self, const struct put_arguments *arguments,
                             const struct reservation *at);
/* Copies a record whose arguments are finished into the ring and commits it; false with an
 * exception. */
bool py_writer_put_one(WriterObject *self, const struct put_arguments *arguments);
/* After a commit: wakes the reader where it sleeps, and lets it run first where that helps. */
void py_writer_tell_reader(WriterObject *self);

#endif
