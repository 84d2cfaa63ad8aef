/* Packing: from the trajectories of groups to the arrays of a batch. */
#ifndef SHMBUS_PYTHON_BATCH_BATCH_H
#define SHMBUS_PYTHON_BATCH_BATCH_H

#include "python/binding.h"

#include <stdatomic.h>

#include "batch/threads.h"
#include "python/record/record.h"

/* ---- Arrays of the caller, checked before the first access through them. */
/* Elements of an array; 0 for a non-array, which py_check_array refuses. */
uint64_t py_array_elements(PyObject *object);
/* Check for a contiguous one-dimensional array and store its data pointer; false with an
 * exception. */
bool py_check_array(PyObject *object, const char *name, int type, uint64_t length, bool writeable,
                    void *data);

/* ---- Extra fields of a batch, of arbitrary dtype and shape, copied unchanged.
 *
 * Invariants:
 * - Every record's rows share one dtype and row shape: the caller's, or the first record's.
 * - Pointers filled in by py_extras_find stay in the segment while the trajectories are leased. */
enum extra_kind {
    EXTRA_TOKEN = 0,    /* one row per token */
    EXTRA_RAGGED = 1,   /* arbitrary row count */
    EXTRA_SEQUENCE = 2, /* one row: the whole array */
    EXTRA_KINDS
};

/* One field across the trajectories. */
struct extra {
    PyObject *name; /* borrowed from the caller's specs, like a given dtype */
    enum extra_kind kind;
    bool optional;
    PyArray_Descr *dtype; /* borrowed from the spec or a schema; NULL before the first */
    int ndim;             /* of a row */
    uint64_t sizes[SHMBUS_MAX_NDIM], row_bytes;
    uint64_t rows; /* summed over the trajectories seen */
    /* Position of the field in the last schema seen. */
    const SchemaObject *schema;
    int at;
    /* Destination; NULL during measurement. */
    uint8_t *out;
};

/* One trajectory's rows of one field; no data if the trajectory lacks an optional field. */
struct extra_source {
    const uint8_t *data;
    uint64_t rows;
    uint64_t before; /* rows of the preceding trajectories */
};

/* The fields of a call; trajectory i uses the `count` sources from sources[i * count] on. */
struct extras {
    struct extra *fields;
    struct extra_source *sources;
    Py_ssize_t count;
    PyObject *keep; /* schemas of the borrowed dtypes */
};

/* specs: tuples (name, kind, optional, dtype or None, row sizes, ...); then py_extras_clear. */
bool py_extras_read(struct extras *self, PyObject *specs, Py_ssize_t trajectories);
/* Read uint8 [bytes], the last element of every spec, once the sizes are known. */
bool py_extras_read_destination(struct extras *self, PyObject *specs);
/* Find the fields of trajectory i, which must be readable and hold `tokens` tokens. */
bool py_extras_find(struct extras *self, Py_ssize_t i, TrajectoryObject *t, uint64_t tokens);
void py_extras_clear(struct extras *self);
/* Copy rows of n tokens of sequence i, and its other rows with the first; no interpreter. */
void py_extras_copy(const struct extras *self, Py_ssize_t i, uint64_t from, uint64_t n);

/* ---- Field addresses of trajectories: found and checked here only, for every reader.
 *
 * Invariant: pointers filled in by py_find_sources stay in the segment while the trajectories are
 * leased. */
enum { FIELD_TOKENS, FIELD_MASK, FIELD_LOGPROBS, FIELD_ADVANTAGES, FIELDS };

/* Field addresses of one trajectory; NULL for a missing field. */
struct source {
    TrajectoryObject *trajectory;
    const uint8_t *data[FIELDS];
    uint64_t length;
    uint8_t kinds[FIELDS];
};

/* Raise ValueError for a field of a trajectory; steals `got`, whose NULL carries its own
 * exception. */
bool py_field_error(const TrajectoryObject *t, PyObject *name, const char *expected,
                    PyObject *got);

/* True if int32 borders can index the tokens; false with an exception. */
bool py_batch_fits(uint64_t tokens);

/* Facts cached from the previous trajectory; all zeros at first. */
struct lookup {
    const SchemaObject *schema;
    const HolderObject *holder;
    uint16_t shape_at[FIELDS]; /* NO_FIELD if absent from the schema */
    uint8_t kinds[FIELDS];
    bool to_check; /* payload of these kinds needs a check */
    uint32_t signature; /* kinds of the present fields, tokens first; 0xff for an absent field */
    /* Over the trajectories so far; a bit per field. */
    uint8_t has, lacks;
    bool rows; /* set once a sample has row lengths, hence several sequences */
    PyObject *field_names; /* NULL, or a list to fill with the names of every schema, borrowed */
};
#define NO_FIELD UINT16_MAX

/* The slow paths of py_find_source: a new holder or schema, a non-trajectory, a payload to check, a
 * field longer or shorter than the tokens. On failure false with an exception naming the
 * mismatch. */
bool py_look_closer(struct lookup *lookup, PyObject *item, PyObject *const *names);
bool py_check_payload(const struct source *source, PyObject *const *names);
bool py_length_error(const struct source *source, uint64_t length, PyObject *name);

/* Find the fields of one trajectory; false with an exception. Facts about a trajectory hold for the
 * next of the same holder and schema, so the fast path does only the work per trajectory. The
 * caller keeps the item alive. */
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

/* Fill one source per trajectory of the list; the lookup must be new. */
bool py_find_sources(struct lookup *lookup, PyObject *items, PyObject *const *names,
                     struct source *sources);
void py_prefetch_trajectory(const PyObject *item);

/* ---- Copying sequences into the columns of a batch, in pieces shared by several threads.
 *
 * Invariant: with every number of threads an element is written once, by the same conversion. */
struct piece {
    uint32_t sequence, from, tokens;
};

struct copy_job {
    const struct source *sources;
    const struct extras *extras;
    const float *gains; /* per sequence, for samples without advantages of their own */
    const int32_t *borders;
    struct piece *pieces;
    uint32_t count;
    int64_t *tokens, *positions;
    uint8_t *mask;
    float *logprobs, *advantages;
    _Atomic bool not_finite;
};

/* Cut `sequences` sequences of `total` tokens into pieces; false with an exception. */
bool py_copy_job_cut(struct copy_job *job, Py_ssize_t sequences, uint64_t total);
/* Copy every piece without the interpreter lock. Return true if logprobs and advantages are
 * finite. */
bool py_copy_job_run(struct copy_job *job, struct threads *helpers);
void py_copy_job_clear(struct copy_job *job);

/* ---- GatherThreads: threads for copying batches, for Python. */
extern PyTypeObject GatherThreadsType;

/* True for a GatherThreads or None; otherwise false with an exception. */
bool py_gather_threads_check(PyObject *object);
/* Start or borrow the helpers, which live until py_gather_threads_finish. NULL, for the caller
 * alone, for None or a closed object. The first call starts the threads; if starting fails, false
 * with an exception. Begin and finish need the interpreter lock. */
bool py_gather_threads_begin(PyObject *object, struct threads **threads);
void py_gather_threads_finish(PyObject *object);

/* ---- Search for words in the encoded meta of trajectories. */
/* True for a tuple of bytes; otherwise false with an exception. */
bool py_check_words(PyObject *words);
/* True if the encoded meta of a readable trajectory contains a word. */
bool py_meta_mentions(const TrajectoryObject *t, PyObject *words);
/* False with an exception. */
bool py_append_number(PyObject *list, Py_ssize_t number);

/* Registered by module.c. */
extern PyMethodDef py_arrays_functions[];
extern PyMethodDef py_extra_fields_functions[];
extern const struct named_value py_extra_fields_constants[];
extern const struct named_value py_gather_plan_constants[];
extern PyMethodDef py_gather_plan_functions[];
bool py_gather_plan_add_objects(PyObject *module);
bool py_gather_threads_add_constants(PyObject *module);
extern PyMethodDef py_pack_functions[];

#endif
