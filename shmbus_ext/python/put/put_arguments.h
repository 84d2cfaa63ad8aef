/* A producer's keywords and arrays, checked and planned as a record. */
#ifndef SHMBUS_PYTHON_PUT_ARGUMENTS_H
#define SHMBUS_PYTHON_PUT_ARGUMENTS_H

#include "python/record/schema.h"
#include "ring/requests.h"

/* What a producer hands over, between Python and a record. */
struct put_arguments {
    PyObject *id_object;
    PyObject *meta_object; /* NULL for none */
    PyObject *split_object; /* a label; NULL for "train" */
    PyObject *rows_object; /* NULL for a sample of one row */
    PyObject *values[SHMBUS_MAX_FIELDS];
    PyObject *names[SHMBUS_MAX_FIELDS];
    PyArrayObject *arrays[SHMBUS_MAX_FIELDS]; /* owned, contiguous; NULL for a list */
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS]; /* of the array, of `declared`, or for ever */
    uint8_t kinds[SHMBUS_MAX_FIELDS];         /* enum stored_kind; of lists only */
    PyObject *meta_encoded;                   /* owned */
    PyObject *schema;                         /* owned: the bytes that spec.schema points into */
    double timeout_s;                         /* negative: for ever */
    PyObject *declared; /* owned: the schema that it was checked against */
    uint32_t array_count;
    uint32_t list_count; /* fields that are still lists */
    bool has_group_size, has_index;
    uint64_t shape[SHMBUS_MAX_SHAPE_WORDS];
    uint64_t field_bytes[SHMBUS_MAX_FIELDS];
    uint8_t field_ndim[SHMBUS_MAX_FIELDS];
    struct record_spec spec;
    struct request_claim answers; /* number 0 for none */
};

void py_arguments_begin(struct put_arguments *self);
void py_arguments_end(struct put_arguments *self);
/* One keyword; name is a str. False with an exception set. */
bool py_arguments_take(struct put_arguments *self, PyObject *name, PyObject *value);
/* Every entry of a dict; false with an exception. */
bool py_arguments_take_mapping(struct put_arguments *self, PyObject *item);
bool py_arguments_take_id(struct put_arguments *self, PyObject *value);
/* A prompt's key as text, which the reference that is returned keeps; NULL with an exception. */
PyObject *py_take_id(PyObject *value, const char **text, uint32_t *size);
/* An int, by __index__: numpy integers are, floats and bools are not; false with an exception. */
bool py_take_integer(PyObject *value, const char *name, int64_t low, int64_t high, int64_t *out);
/* None, or the number of a round; false with an exception. */
bool py_parse_round(PyObject *value, int64_t *round);
/* After all were taken: what is no field is complete and encoded. */
bool py_arguments_finish_head(struct put_arguments *self);
/* A field, whatever its name; false with an exception. */
bool py_arguments_take_field(struct put_arguments *self, PyObject *name, PyObject *value);
bool py_parse_timeout(PyObject *value, double *timeout_s);
/* None is a score that is not known yet. */
bool py_parse_score(PyObject *value, double *score);
/* One version, or the oldest and the newest, of which `span` is the distance. */
bool py_parse_policy_versions(PyObject *value, int64_t *oldest, uint32_t *span);
bool py_arguments_init(void);
/* ROW_LENGTHS: the field's name. */
bool py_arguments_add_constants(PyObject *module);

#endif
