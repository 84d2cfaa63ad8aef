/* A producer's lane, and room for a record in it: what put, put_many and reserve share. */
#ifndef SHMBUS_PYTHON_CLAIM_ROOM_H
#define SHMBUS_PYTHON_CLAIM_ROOM_H

#include "python/put/plan_fields.h"
#include "python/segment/segment_object.h"
#include "python/watch.h"
#include "ring/writer.h"

/* A wait for space is cut into slices of this, for signals and for a close during it. */
#define SPACE_SLICE_NS INT64_C(100000000)

struct batch;

/* What a record needs of the bus before it can be written. */
struct wanted_room {
    uint64_t bytes;
    uint64_t begins; /* the key of its group, if it were for training; 0 where groups have no bound */
    PyObject *split_object; /* of the arguments, which live longer; NULL for training */
};

typedef struct writer_object {
    PyObject_HEAD
    SegmentObject *segment;
    struct writer c;
    struct schema_cache schemas;
    DeclaredSchemaObject *declared; /* what it puts is checked by; NULL for no schema */
    struct list_link reservations; /* that are not ended */
    struct batch *batches;         /* put_many's under way, in whatever thread */
    uint64_t bytes;
    uint64_t full_waits;
    uint32_t flags;
    uint32_t busy;   /* threads that copy into this lane without the interpreter lock */
    struct watch watch; /* over a wait for space */
    bool attached;
    bool closing;
    bool too_far; /* what the last claim failed for: its group may not begin yet */
    bool moving; /* a thread is about to take it to another bus */
    /* Goes on in the bus that takes the place of a removed one; NULL where it does not follow. */
    bool (*follow)(struct writer_object *self, double timeout_s);
    /* Of the lane's counters, when this writer took it; less what it had counted elsewhere. */
    uint64_t committed_base, aborted_base;
    char label[SHMBUS_LABEL_BYTES];
} WriterObject;

/* Sets an exception when the writer is closed or was made before a fork. */
bool py_writer_usable(WriterObject *self);
/* A paused bus is a full one, to those who want to write, and so is one whose producers are too far
 * ahead for another group. */
enum writer_status py_writer_try_claim(WriterObject *self, const struct wanted_room *wanted,
                                       struct reservation *at);
/* Sleeps until this segment, which the caller holds, may have space, and counts the wait; other
 * threads run. */
void py_writer_sleep(WriterObject *self, SegmentObject *here, uint32_t ticket, int64_t longest_ns);
/* Room for a record, waiting for it as long as timeout_s allows, for ever where that is negative;
 * false with an exception. */
bool py_writer_claim_room(WriterObject *self, const struct wanted_room *wanted, double timeout_s,
                          struct reservation *at);
/* What a record of these finished arguments needs. */
struct wanted_room py_writer_wants(const WriterObject *self,
                                   const struct put_arguments *arguments);
/* Once the bus was removed: waits for the next one for timeout_s, for ever where that is negative,
 * and goes on there; open reservations and batches are aborted. True where the writer may try
 * again; false with an exception, BusRemovedError where it does not follow or none was in time. */
bool py_writer_go_on(WriterObject *self, double timeout_s);
/* Gives up room that was claimed and is not published or reserved. */
void py_writer_leave_room(WriterObject *self, const struct reservation *at);
/* Room for a record whose arguments are finished, its lists converted: in their place already, or in arrays that py_writer_fill_reserved copies. */
bool py_writer_claim_filled(WriterObject *self, struct put_arguments *arguments,
                            struct reservation *at);
/* The number of the arguments' split in the bus that has the room; false with an exception, and then
 * the claim is given up. After the claim, since a wait for it may have led to another bus. */
bool py_writer_find_split(WriterObject *self, struct put_arguments *arguments,
                          const struct reservation *at);
/* Frame and body of a record whose arguments are finished. */
void py_writer_write_head(WriterObject *self, const struct put_arguments *arguments,
                          const struct reservation *at);
/* Meta and arrays of a record that nobody sees yet. */
void py_writer_fill(const WriterObject *self, const struct put_arguments *arguments,
                    const struct reservation *at);
/* Meta and arrays of a record that is reserved. Other threads run while a large one is copied. */
void py_writer_fill_reserved(WriterObject *self, const struct put_arguments *arguments,
                             const struct reservation *at);
/* Copies a record whose arguments are finished into the ring and commits it; false with an
 * exception. */
bool py_writer_put_one(WriterObject *self, struct put_arguments *arguments);
/* After a commit: wakes the reader where it sleeps, and lets it run first where that helps. */
void py_writer_tell_reader(WriterObject *self);

#endif
