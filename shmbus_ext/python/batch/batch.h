/* Packing: from the trajectories of groups to the arrays of a batch. */
#ifndef SHMBUS_PYTHON_BATCH_BATCH_H
#define SHMBUS_PYTHON_BATCH_BATCH_H

#include "python/binding.h"

#include <stdatomic.h>

#include "batch/threads.h"
#include "python/record/record.h"

/* ---- Arrays of the caller's: checked before anything is read or written through them. */
/* Elements of an array; 0 of anything else, which py_check_array refuses. */
uint64_t py_array_elements(PyObject *object);
/* Whether it is a contiguous array of one dimension, and its data; false with an exception. */
bool py_check_array(PyObject *object, const char *name, int type, uint64_t length, bool writeable,
                    void *data);

/* ---- Further fields of a batch, of any dtype and shape: copied as they are.
 *
 * Invariants:
 * - All that is copied of a field has one dtype and row shape: the caller's, or the first record's.
 * - What py_extras_find fills in is in the segment while the trajectories are leased. */
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

/* The fields of a call; of trajectory i the next `count` from sources[i * count]. */
struct extras {
    struct extra *fields;
    struct extra_source *sources;
    Py_ssize_t count;
    PyObject *keep; /* schemas whose dtypes are borrowed */
};

/* specs: tuples (name, kind, optional, dtype or None, row sizes, ...); then py_extras_clear. */
bool py_extras_read(struct extras *self, PyObject *specs, Py_ssize_t trajectories);
/* Takes uint8 [bytes], the last of each spec, when the sizes are known. */
bool py_extras_read_destination(struct extras *self, PyObject *specs);
/* Finds the fields of trajectory i, which is readable and has so many tokens. */
bool py_extras_find(struct extras *self, Py_ssize_t i, TrajectoryObject *t, uint64_t tokens);
void py_extras_clear(struct extras *self);
/* Copies rows of n tokens of sequence i, and its other rows with the first; no interpreter. */
void py_extras_copy(const struct extras *self, Py_ssize_t i, uint64_t from, uint64_t n);

/* ---- Where the fields of trajectories lie: found and checked in one place, for all that reads them.
 *
 * Invariant: what py_find_sources fills in is in the segment while the trajectories are leased. */
enum { FIELD_TOKENS, FIELD_MASK, FIELD_LOGPROBS, FIELD_ADVANTAGES, FIELDS };

/* Where one trajectory's fields lie; NULL for a field that it does not have. */
struct source {
    TrajectoryObject *trajectory;
    const uint8_t *data[FIELDS];
    uint64_t length;
    uint8_t kinds[FIELDS];
};

/* Raises ValueError for a field of a trajectory; `got` is taken, NULL with its own exception. */
bool py_field_error(const TrajectoryObject *t, PyObject *name, const char *expected,
                    PyObject *got);

/* Whether int32 borders can index so many tokens; false with an exception. */
bool py_batch_fits(uint64_t tokens);

/* What was found out for the trajectory before; all zeros at first. */
struct lookup {
    const SchemaObject *schema;
    const HolderObject *holder;
    uint16_t shape_at[FIELDS]; /* NO_FIELD where the schema has none */
    uint8_t kinds[FIELDS];
    bool to_check; /* payload of these kinds may not do */
    uint32_t signature; /* which fields there are, and their kinds; 0xff for none, tokens first */
    /* Of all trajectories so far; a bit for each field. */
    uint8_t has, lacks;
    bool rows; /* whether one has row lengths, and so is several sequences */
    PyObject *field_names; /* NULL, or a list that gets the names of each schema, borrowed */
};
#define NO_FIELD UINT16_MAX

/* The slow ways of py_find_source: a trajectory of another holder or schema than the one before, or
 * none; kinds whose payload has to be checked; a field of another length than the tokens. Each is
 * false with an exception that names what does not fit. */
bool py_look_closer(struct lookup *lookup, PyObject *item, PyObject *const *names);
bool py_check_payload(const struct source *source, PyObject *const *names);
bool py_length_error(const struct source *source, uint64_t length, PyObject *name);

/* Where one trajectory's fields lie; false with an exception. What holds for one trajectory holds
 * for the next of the same holder and the same schema, so here is only what is left to do for each
 * of thousands. The caller keeps the item alive. */
static inline bool py_find_source(struct lookup *lookup, PyObject *item, PyObject *const *names,
                                  struct source *source) {
    TrajectoryObject *t = (TrajectoryObject *)item;
    if ((!Py_IS_TYPE(item, &TrajectoryType) || lookup->schema != t->schema ||
         lookup->holder != t->holder || t->released) &&
        !py_look_closer(lookup, item, names)) {
        return false;
    }
    const uint8_t *bytes = py_trajectory_bytes(t);
    source->trajectory = t;
    source->length = t->shape[lookup->shape_at[FIELD_TOKENS] + 1];
    for (int f = 0; f < FIELDS; f++) {
        source->kinds[f] = lookup->kinds[f];
        source->data[f] = NULL;
        if (lookup->shape_at[f] != NO_FIELD) {
            const uint64_t *shape = t->shape + lookup->shape_at[f];
            if (shape[1] != source->length) {
                return py_length_error(source, shape[1], names[f]);
            }
            source->data[f] = bytes + shape[0];
        }
    }
    return !lookup->to_check || py_check_payload(source, names);
}

/* As many sources as the list has trajectories; the lookup is new. */
bool py_find_sources(struct lookup *lookup, PyObject *items, PyObject *const *names,
                     struct source *sources);
void py_prefetch_trajectory(const PyObject *item);

/* ---- Copying sequences into the columns of a batch, in pieces that several threads may share.
 *
 * Invariant: with any number of threads each element is written once, by the same conversion. */
struct piece {
    uint32_t sequence, from, tokens;
};

struct copy_job {
    const struct source *sources;
    const struct extras *extras;
    const float *gains; /* of each sequence, where it brings no advantages of its own */
    const int32_t *borders;
    struct piece *pieces;
    uint32_t count;
    int64_t *tokens, *positions;
    uint8_t *mask;
    float *logprobs, *advantages;
    _Atomic bool not_finite;
};

/* Finds the pieces of so many sequences, of so many tokens in all; false with an exception. */
bool py_copy_job_cut(struct copy_job *job, Py_ssize_t sequences, uint64_t total);
/* Copies all of them, without the interpreter lock; whether all logprobs and advantages are finite. */
bool py_copy_job_run(struct copy_job *job, struct threads *helpers);
void py_copy_job_clear(struct copy_job *job);

/* ---- GatherThreads: the threads that copy batches, for Python. */
extern PyTypeObject GatherThreadsType;

/* Whether it is a GatherThreads or None; false with an exception. */
bool py_gather_threads_check(PyObject *object);
/* Its helpers, which do not end before py_gather_threads_finish; NULL, for the caller alone, of None
 * and of one that is closed. False with an exception where they cannot be started, which the first
 * call does. Both are called with the interpreter lock. */
bool py_gather_threads_begin(PyObject *object, struct threads **threads);
void py_gather_threads_finish(PyObject *object);

/* ---- Which trajectories mention a word in their encoded meta. */
/* Whether it is a tuple of bytes; false with an exception. */
bool py_check_words(PyObject *words);
/* Whether the encoded meta of a trajectory that is readable contains one of the words. */
bool py_meta_mentions(const TrajectoryObject *t, PyObject *words);
/* False with an exception. */
bool py_append_number(PyObject *list, Py_ssize_t number);

/* What module.c adds. */
extern PyMethodDef py_arrays_functions[];
extern PyMethodDef py_extra_fields_functions[];
extern const struct named_value py_extra_fields_constants[];
extern const struct named_value py_gather_plan_constants[];
extern PyMethodDef py_gather_plan_functions[];
bool py_gather_plan_add_objects(PyObject *module);
bool py_gather_threads_add_constants(PyObject *module);
extern PyMethodDef py_pack_functions[];

#endif
