/* Further fields of a batch, of any dtype and shape: copied as they are.
 *
 * Invariants:
 * - All that is copied of one field has one dtype and one row shape; the first record that has the
 *   field decides, or the caller.
 * - What py_extras_find has filled in is within the segment, and stays there for as long as the
 *   trajectories are leased. */
#ifndef SHMBUS_PYTHON_EXTRA_FIELDS_H
#define SHMBUS_PYTHON_EXTRA_FIELDS_H

#include "python/record/trajectory.h"

enum extra_kind {
    EXTRA_TOKEN = 0,    /* a row a token */
    EXTRA_RAGGED = 1,   /* any number of rows */
    EXTRA_SEQUENCE = 2, /* one row: the whole array */
    EXTRA_KINDS
};

/* One field of all trajectories. */
struct extra {
    PyObject *name; /* borrowed from the caller's specs, as the dtype that was given */
    enum extra_kind kind;
    bool optional;
    PyArray_Descr *dtype; /* borrowed from the spec or a schema; NULL before the first */
    int ndim;             /* of a row */
    uint64_t sizes[SHMBUS_MAX_NDIM], row_bytes;
    uint64_t rows; /* of all trajectories that were met */
    /* Where the field stands in the schema that was met last. */
    const SchemaObject *schema;
    int at;
    /* Where it goes; NULL while it is only measured. */
    uint8_t *out;
};

/* One trajectory's rows of one field; no data where it lacks an optional field. */
struct extra_source {
    const uint8_t *data;
    uint64_t rows;
    uint64_t before; /* rows of the trajectories before it */
};

/* The fields that a call is about, and what was found of them: of trajectory i the next `count`
 * from sources[i * count]. */
struct extras {
    struct extra *fields;
    struct extra_source *sources;
    Py_ssize_t count;
    PyObject *keep; /* schemas whose dtypes are borrowed */
};

/* specs: a tuple of (name, kind, optional, dtype or None, row sizes, ...); false with an exception.
 * Ends by py_extras_clear in either case. */
bool py_extras_read(struct extras *self, PyObject *specs, Py_ssize_t trajectories);
/* Takes uint8 [bytes], the last of each spec; after all were found, so that their sizes are
 * known. */
bool py_extras_read_destination(struct extras *self, PyObject *specs);
/* Finds the fields of trajectory i, which is readable and has so many tokens. */
bool py_extras_find(struct extras *self, Py_ssize_t i, TrajectoryObject *t, uint64_t tokens);
void py_extras_clear(struct extras *self);
/* Copies of sequence i the rows of n tokens, and with its first ones what has no row a token: without
 * the interpreter, and from several threads. */
void py_extras_copy(const struct extras *self, Py_ssize_t i, uint64_t from, uint64_t n);

bool py_extra_fields_add_functions(PyObject *module);

#endif
