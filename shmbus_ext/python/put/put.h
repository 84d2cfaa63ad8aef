/* A producer for Python: what was given, where it fits, how it is filled and published. */
#ifndef SHMBUS_PYTHON_PUT_PUT_H
#define SHMBUS_PYTHON_PUT_PUT_H

#include "python/binding.h"
#include "batch/element.h"
#include "python/record/record.h"
#include "python/segment/segment.h"
#include "python/hooks.h"
#include "ring/requests.h"
#include "ring/writer.h"

/* ---- A producer's keywords and arrays, checked and planned as a record. */
/* What put_arguments knows of each field, before py_arguments_keep. */
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

/* What a producer hands over, between Python and a record. */
struct put_arguments {
    PyObject *id_object;
    PyObject *meta_object; /* NULL for none */
    PyObject *split_object; /* a label; NULL for "train" */
    PyObject *rows_object; /* NULL for a sample of one row */
    PyObject **values;
    PyObject **names;
    PyArrayObject **arrays;   /* owned, contiguous; NULL for a list not converted */
    PyArray_Descr **dtypes;   /* of the array, of `declared`, or for ever */
    uint8_t *kinds;           /* enum stored_kind; of lists only */
    uint64_t *shape;
    uint64_t *field_bytes;
    uint8_t *field_ndim;
    void *kept;               /* owned: arrays, field_bytes, shape and field_ndim; NULL before that */
    PyObject *meta_encoded;                   /* owned */
    PyObject *schema;                         /* owned: the bytes that spec.schema points into */
    double timeout_s;                         /* negative: for ever */
    PyObject *declared; /* owned: the schema that it was checked against */
    uint32_t array_count;
    bool has_group_size, has_index;
    struct record_spec spec;
    struct request_claim answers; /* number 0 for none */
    bool unwanted; /* `answers` is not held any more, and nothing was put */
};

void py_arguments_begin(struct put_arguments *self, struct put_fields *fields);
/* Once the record is planned and lists are converted: keeps what its write needs of the fields in
 * memory of their number, so that the put_fields can serve another sample. False with an exception. */
bool py_arguments_keep(struct put_arguments *self);
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
bool py_parse_timeout(PyObject *value, double *timeout_s);
/* None is a score that is not known yet. */
bool py_parse_score(PyObject *value, double *score);
/* One version, or the oldest and the newest, of which `span` is the distance. */
bool py_parse_policy_versions(PyObject *value, int64_t *oldest, uint32_t *span);
bool py_arguments_init(void);

/* ---- The fields of a put: matched with the declared schema, taken as arrays or lists, and planned. */
/* After all arguments were taken: checks the fields, by the declared schema where there is one, and
 * plans the record. False with an exception. */
bool py_arguments_finish(struct put_arguments *self, struct schema_cache *cache,
                         DeclaredSchemaObject *declared);
/* Whether a field of so many dimensions fits behind so many words; false with an exception. */
bool py_arguments_shape_fits(PyObject *name, uint32_t words, Py_ssize_t ndim);

/* Makes arrays of the lists, by code of their elements where need be; false with an exception. */
bool py_arguments_convert_lists(struct put_arguments *self);

bool py_plan_fields_init(void);
/* What NumPy makes an array of, by the hook; NULL with an exception. */
PyObject *py_as_array(PyObject *name, PyObject *value, bool declared);
/* The last step, of all that is planned: the schema, and the places of the parts, of which
 * `too_large` is said where no record holds them. False with an exception. */
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

/* ---- A producer's lane, and room for a record in it: what put, put_many and reserve share. */
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
/* To those who write a bus is full that is paused, or too far ahead for another group. */
enum writer_status py_writer_try_claim(WriterObject *self, const struct wanted_room *wanted,
                                       struct reservation *at);
/* Sleeps, while other threads run, until this segment, which the caller holds, may have space. */
void py_writer_sleep(WriterObject *self, SegmentObject *here, uint32_t ticket, int64_t longest_ns);
/* Room for a record, awaited for timeout_s, for ever if negative; false with an exception. */
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
/* The same of a record that is reserved: other threads run while a large one is copied. */
void py_writer_fill_reserved(WriterObject *self, const struct put_arguments *arguments,
                             const struct reservation *at);
/* Copies a record of finished arguments into the ring and commits it; false with an exception. */
bool py_writer_put_one(WriterObject *self, struct put_arguments *arguments);
/* After a commit: wakes the reader where it sleeps, and lets it run first where that helps. */
void py_writer_tell_reader(WriterObject *self);

/* A method of Writer: samples that it took and did not make. */
PyObject *py_writer_note_unmade(WriterObject *self, PyObject *args);

/* ---- From lists, numbers and arrays of another dtype into an array of the field's. */
/* Whether it is converted element by element: a list or a tuple. */
static inline bool py_is_list(PyObject *value) {
    return PyList_Check(value) || PyTuple_Check(value);
}

/* Sizes of a nested list by its first elements. Returns the number of dimensions, -1 with an
 * exception. In a list without elements no more than its own size, 0, is known. */
int py_list_sizes(PyObject *name, PyObject *value, uint64_t sizes[SHMBUS_MAX_NDIM]);

/* A new array with the elements of a nested list, or of one number where ndim is 0; NULL with an
 * exception that names field and index. Runs the code of elements that are no exact numbers. */
PyArrayObject *py_convert_list(PyObject *name, PyObject *value, PyArray_Descr *dtype,
                               enum stored_kind kind, int ndim, const uint64_t *sizes);

/* A new array with the elements of another; NULL with an exception that names field and index. */
PyArrayObject *py_convert_array(PyObject *name, PyArrayObject *array, PyArray_Descr *dtype,
                                enum stored_kind kind);

/* ---- Producer.put_group: all records of a group, committed by one store. */
/* _put_group(items: [put's arguments], timeout): all or none, also where the process dies. */
PyObject *py_writer_put_group(WriterObject *self, PyObject *args);
PyObject *py_writer_cancelled(WriterObject *self, PyObject *args, PyObject *kwargs);

/* ---- Producer.put_many, and what closing does to one that is under way in another thread. */
PyObject *py_writer_put_many(WriterObject *self, PyObject *args, PyObject *kwargs);
/* Aborts what is reserved and not committed, of all put_many's under way. */
void py_writer_abort_batches(WriterObject *self);

/* ---- Methods of Writer about the samples that it takes from the request lane. */
PyObject *py_writer_take_requests(WriterObject *self, PyObject *args);
PyObject *py_writer_give_back_request(WriterObject *self, PyObject *claim);
PyObject *py_writer_holds_request(WriterObject *self, PyObject *claim);
PyObject *py_writer_recover_dead(WriterObject *self, PyObject *ignored);
/* From a tuple that take_requests gave; false with an exception. */
bool py_take_claim(const WriterObject *self, PyObject *object, struct request_claim *claim);

/* ---- A reservation, whose arrays are filled in the ring itself. */
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

/* ---- Restorer: writes what a snapshot holds into a new segment. */
extern PyTypeObject RestorerType;

/* ---- Writer: what shmbus.Producer is made of. */
extern PyTypeObject WriterType;

/* What module.c adds. */
bool py_arguments_add_constants(PyObject *module);
bool py_plan_fields_add_constants(PyObject *module);
extern const struct named_value py_waits_constants[];
extern PyMethodDef py_waits_functions[];
bool py_waits_add_objects(PyObject *module);
extern PyMethodDef py_convert_functions[];
extern PyMethodDef py_import_functions[];
extern PyMethodDef py_relay_functions[];
extern const struct named_value py_relay_constants[];

#endif
