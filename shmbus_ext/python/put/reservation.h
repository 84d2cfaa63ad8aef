/* A reservation, whose arrays are filled in the ring itself. */
#ifndef SHMBUS_PYTHON_RESERVATION_H
#define SHMBUS_PYTHON_RESERVATION_H

#include "python/put/claim_room.h"
#include "python/record/views.h"

typedef struct {
    PyObject_HEAD
    WriterObject *writer;
    KeeperObject *keeper;
    struct reservation at;
    PyObject *names; /* tuple */
    PyArrayObject *arrays[SHMBUS_MAX_FIELDS];
    uint16_t shape_at[SHMBUS_MAX_FIELDS];
    uint32_t count;
    uint32_t meta_offset; /* in the record */
    uint32_t meta_room;
    double score;
    int64_t policy_version;
    uint32_t version_span;
    bool ended;
    bool resized;
    PyObject *declared; /* the schema that it was checked by, or NULL */
    struct list_link link; /* of its writer, until it is ended */
} ReservationObject;
extern PyTypeObject ReservationType;

/* _reserve(head: dict of put's arguments but arrays, names: tuple[str], dtypes: tuple[dtype],
 * shapes: tuple[tuple[int]], meta_room: int) -> Reservation */
PyObject *py_writer_reserve(WriterObject *self, PyObject *args);
/* Ends every open reservation without a commit. */
void py_writer_abort_open(WriterObject *self);

#endif
