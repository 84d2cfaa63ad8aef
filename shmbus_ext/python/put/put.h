/* A producer for Python: arguments, room, contents and commit of a record. */
#pragma once

#include "python/binding.h"
#include "batch/element.h"
#include "python/record/record.h"
#include "python/segment/segment.h"
#include "python/hooks.h"
#include "ring/requests.h"
#include "ring/writer.h"

/* ---- A producer's keywords and arrays, checked and planned as a record. */
/* Storage of put_arguments per field, before py_arguments_keep. */
struct put_fields {
    PyObject *values[SHMBUS_MAX_FIELDS];
    PyObject *names[SHMBUS_MAX_FIELDS];
    PyArrayObject *arrays[SHMBUS_MAX_FIELDS];
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    uint64_t shape[SHMBUS_MAX_SHAPE_WORDS];
    uint64_t field_bytes[SHMBUS_MAX_FIELDS];
    uint8_t kinds[SHMBUS_MAX_FIELDS];
    uint8_t field_ndim[SHMBUS_MAX_FIELDS];
};

/* A producer's arguments, between Python and a record. */
struct put_arguments {
    PyObject *id_object;
    PyObject *meta_object; /* NULL without meta */
    PyObject *split_object; /* a label; NULL for "train" */
    PyObject *rows_object; /* NULL for a single row */
    PyObject **values;
    PyObject **names;
    PyArrayObject **arrays;   /* owned, contiguous; NULL for a list not converted */
    PyArray_Descr **dtypes;   /* of the array, of `declared`, or static */
    uint8_t *kinds;           /* enum stored_kind; set for lists only */
    uint64_t *shape;
    uint64_t *field_bytes;
    uint8_t *field_ndim;
    void *kept;               /* owned: arrays, field_bytes, shape and field_ndim; NULL at first */
    PyObject *meta_encoded;                   /* owned */
    PyObject *schema;                         /* owned: the bytes behind spec.schema */
    double timeout_s;                         /* negative: for ever */
    PyObject *declared; /* owned: the schema used for the check */
    uint32_t array_count;
    bool has_group_size, has_index;
    struct record_spec spec;
    struct request_claim answers; /* number 0 without a request */
    bool unwanted; /* the claim `answers` was lost, and nothing was put */
};

void py_arguments_begin(struct put_arguments *self, struct put_fields *fields);
/* Call after planning and list conversion: move the fields' data needed for the write into a
 * private block, to free the put_fields for the next sample. False with an exception. */
bool py_arguments_keep(struct put_arguments *self);
void py_arguments_end(struct put_arguments *self);
/* Take one keyword argument; `name` is a str. False with an exception. */
bool py_arguments_take(struct put_arguments *self, PyObject *name, PyObject *value);
/* Take every entry of a dict; false with an exception. */
bool py_arguments_take_mapping(struct put_arguments *self, PyObject *item);
bool py_arguments_take_id(struct put_arguments *self, PyObject *value);
/* A prompt's key as text, owned by the returned reference; NULL with an exception. */
PyObject *py_take_id(PyObject *value, const char **text, uint32_t *size);
/* Convert an int by __index__: accepts numpy integers, refuses floats and bools; false with an
 * exception. */
bool py_take_integer(PyObject *value, const char *name, int64_t low, int64_t high, int64_t *out);
/* Convert None or a round number; false with an exception. */
bool py_parse_round(PyObject *value, int64_t *round);
/* Call after taking the arguments: complete and encode everything except the fields. */
bool py_arguments_finish_head(struct put_arguments *self);
bool py_parse_timeout(PyObject *value, double *timeout_s);
/* None means an unknown score. */
bool py_parse_score(PyObject *value, double *score);
/* One version, or oldest and newest; `span` receives their distance. */
bool py_parse_policy_versions(PyObject *value, int64_t *oldest, uint32_t *span);

/* ---- The fields of a put: matched with the declared schema, taken as arrays or lists, and planned. */
/* Call after taking the arguments: check the fields, against the declared schema if set, and plan
 * the record. False with an exception. */
bool py_arguments_finish(struct put_arguments *self, struct schema_cache *cache,
                         DeclaredSchemaObject *declared);
/* True if a field of `ndim` dimensions fits behind `words` shape words; false with an exception. */
bool py_arguments_shape_fits(PyObject *name, uint32_t words, Py_ssize_t ndim);

/* Bytes of a field; a product beyond every record stays above. */
uint64_t py_field_bytes(PyArray_Descr *dtype, int ndim, const uint64_t *sizes);

/* Convert lists to arrays, running element code if necessary; false with an exception. */
bool py_arguments_convert_lists(struct put_arguments *self);

/* Convert a value by the hook, like NumPy; NULL with an exception. */
PyObject *py_as_array(PyObject *name, PyObject *value, bool declared);
/* Last planning step: schema and part offsets. A record above every limit raises with the text
 * `too_large`. False with an exception. */
static inline bool py_arguments_plan(struct put_arguments *self, struct schema_cache *cache,
                                     uint32_t count, uint64_t meta_bytes, const char *too_large) {
    struct record_spec *spec = &self->spec;
    spec->field_count = count;
    spec->shape = self->shape;
    spec->field_bytes = self->field_bytes;
    spec->field_ndim = self->field_ndim;
    spec->meta_bytes = meta_bytes;
    self->schema = py_schema_cache_find(cache, spec, self->names, self->dtypes, self->field_ndim);
    if (self->schema == NULL) {
        return false;
    }
    return record_plan(spec) || py_refuse(hooks.too_large_error, "%s", too_large);
}

/* ---- A producer's lane, and room for a record in the lane: shared by put, put_many and
 * reserve. */
/* Longest sleep of a wait for space; between sleeps the wait handles signals and a close. */
#define SPACE_SLICE_NS INT64_C(100000000)

struct batch;

/* A record's claims on the bus before its write. */
struct wanted_room {
    uint64_t bytes;
    uint64_t begins; /* its group's key as if in the training split; 0 without a lead bound */
    uint32_t siblings; /* other samples of the group */
    PyObject *split_object; /* borrowed from the arguments; NULL for training */
};

typedef struct writer_object {
    PyObject_HEAD
    SegmentObject *segment;
    struct writer c;
    struct schema_cache schemas;
    DeclaredSchemaObject *declared; /* checks every put; NULL without a schema */
    struct list_link reservations; /* open reservations */
    struct batch *batches;         /* put_many calls under way, across threads */
    uint64_t bytes;
    uint64_t full_waits;
    uint32_t flags;
    uint32_t busy;   /* threads copying into this lane without the interpreter lock */
    struct watch watch; /* over a wait for space */
    bool attached;
    bool closing;
    uint32_t waits_for; /* kind of the wait after a failed claim: SPACE_FREED, or to begin a group */
    bool moving; /* a thread moves the writer to a successor bus */
    /* Move to the successor of a removed bus; NULL if the writer never follows. */
    bool (*follow)(struct writer_object *self, double timeout_s);
    /* The lane's counters at attach, less counts from earlier buses. */
    uint64_t committed_base, aborted_base;
    char label[SHMBUS_LABEL_BYTES];
} WriterObject;

/* Raise if the writer was closed or made before a fork. */
bool py_writer_usable(WriterObject *self);
/* Try once. Writers see a bus as full while paused, or while too far ahead for a new group. */
enum writer_status py_writer_try_claim(WriterObject *self, const struct wanted_room *wanted,
                                       struct reservation *at);
/* Announce a wait for room, and wake the reader; returns the ticket for py_writer_sleep. */
uint32_t py_writer_want_room(WriterObject *self, SegmentObject *here);
/* Sleep, while other threads run, until this segment may have space; the caller holds the
 * segment. */
void py_writer_sleep(WriterObject *self, SegmentObject *here, uint32_t kinds, uint32_t ticket,
                     int64_t longest_ns);
/* Claim room for a record, waiting up to timeout_s, for ever if negative; false with an
 * exception. */
bool py_writer_claim_room(WriterObject *self, const struct wanted_room *wanted, double timeout_s,
                          struct reservation *at);
/* Room required by a record of finished arguments. */
struct wanted_room py_writer_wants(const WriterObject *self,
                                   const struct put_arguments *arguments);
/* After a bus's removal: wait up to timeout_s for the next bus, for ever if negative, and move
 * there; open reservations and batches are aborted. True if the writer may try again; false with an
 * exception, BusRemovedError if it never follows or no bus came in time. */
bool py_writer_go_on(WriterObject *self, double timeout_s);
/* Give up claimed room, neither published nor reserved. */
void py_writer_leave_room(WriterObject *self, const struct reservation *at);
/* Resolve the arguments' split in the bus of the claimed room; on failure give up the claim, false
 * with an exception. Call after the claim: its wait may have moved the writer to a successor
 * bus. */
bool py_writer_find_split(WriterObject *self, struct put_arguments *arguments,
                          const struct reservation *at);
/* Write frame and body of a record from finished arguments. */
void py_writer_write_head(WriterObject *self, const struct put_arguments *arguments,
                          const struct reservation *at);
/* Write meta and arrays of a record before its commit. */
void py_writer_fill(const WriterObject *self, const struct put_arguments *arguments,
                    const struct reservation *at);
/* Likewise for a reserved record: other threads run during a large copy. */
void py_writer_fill_reserved(WriterObject *self, const struct put_arguments *arguments,
                             const struct reservation *at);
/* Copy a record of finished arguments into the ring and commit the record; false with an
 * exception. */
bool py_writer_put_one(WriterObject *self, struct put_arguments *arguments);
/* After a commit: wake a sleeping reader, and yield the processor if useful. */
void py_writer_tell_reader(WriterObject *self);

/* A method of Writer: count samples taken but never made. */
PyObject *py_writer_note_unmade(WriterObject *self, PyObject *args);

/* ---- Conversion of lists, numbers and arrays of a different dtype into an array of the field's
 * dtype. */
/* True for a list or tuple, converted element by element. */
static inline bool py_is_list(PyObject *value) {
    return PyList_Check(value) || PyTuple_Check(value);
}

/* Sizes of a nested list by its first elements. Return the number of dimensions, -1 with an
 * exception. An empty list ends the search with its size, 0. */
int py_list_sizes(PyObject *name, PyObject *value, uint64_t sizes[SHMBUS_MAX_NDIM]);

/* A new array from a nested list, or from one number if ndim is 0; NULL with an exception naming
 * field and index. Runs the code of inexact number elements. */
PyArrayObject *py_convert_list(PyObject *name, PyObject *value, PyArray_Descr *dtype,
                               enum stored_kind kind, int ndim, const uint64_t *sizes);

/* A new array from an array of a different dtype; NULL with an exception naming field and index. */
PyArrayObject *py_convert_array(PyObject *name, PyArrayObject *array, PyArray_Descr *dtype,
                                enum stored_kind kind);

/* ---- Producer.put_group: every record of a group, committed by one store. */
/* _put_group(items: [put's arguments], timeout): all or nothing, even if the process dies. */
PyObject *py_writer_put_group(WriterObject *self, PyObject *args);
PyObject *py_writer_cancelled(WriterObject *self, PyObject *args, PyObject *kwargs);

/* ---- Producer.put_many, and its abort when a second thread closes the writer. */
PyObject *py_writer_put_many(WriterObject *self, PyObject *args, PyObject *kwargs);
/* Abort the uncommitted reservations of every put_many under way. */
void py_writer_abort_batches(WriterObject *self);

/* ---- Methods of Writer for samples of the request lane. */
PyObject *py_writer_take_requests(WriterObject *self, PyObject *args);
PyObject *py_writer_give_back_request(WriterObject *self, PyObject *claim);
PyObject *py_writer_holds_request(WriterObject *self, PyObject *claim);
PyObject *py_writer_recover_dead(WriterObject *self, PyObject *ignored);
/* Parse a claim tuple of take_requests; false with an exception. */
bool py_take_claim(const WriterObject *self, PyObject *object, struct request_claim *claim);

/* ---- A reservation: its arrays are filled in the ring, in place. */
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
    PyObject *declared; /* the schema used for its check, or NULL */
    struct list_link link; /* in its writer's list, until ended */
} ReservationObject;
extern PyTypeObject ReservationType;

/* _reserve(head: dict of put's arguments except arrays, names: tuple[str], dtypes: tuple[dtype],
 * shapes: tuple[tuple[int]], meta_room: int) -> Reservation */
PyObject *py_writer_reserve(WriterObject *self, PyObject *args);
/* End every open reservation without a commit. */
void py_writer_abort_open(WriterObject *self);

/* ---- Restorer: writes a snapshot's contents into a new segment. */
extern PyTypeObject RestorerType;

/* ---- Writer: the base of shmbus.Producer. */
extern PyTypeObject WriterType;

/* STANDARD_DTYPES: the dtypes of fields that need no declaration, by name. */
PyObject *py_standard_dtypes(void);
/* Registered by module.c. */
PyObject *py_note_waited(PyObject *module, PyObject *args);
PyObject *py_convert_field(PyObject *module, PyObject *args);
extern PyMethodDef py_import_functions[];
extern PyMethodDef py_relay_functions[];
