/* Packing: from the trajectories of groups to the arrays of a batch. */
#pragma once

#include "python/binding.h"

#include "batch/helpers.h"
#include "python/record/record.h"

/* ---- Arrays of the caller, checked before the first access through them. */
/* Elements of an array; 0 for a non-array, which py_check_array refuses. */
uint64_t py_array_elements(PyObject *object);
/* Check for a contiguous one-dimensional array and store its data pointer; false with an
 * exception. */
bool py_check_array(PyObject *object, const char *name, int type, uint64_t length, bool writeable,
                    void *data);

/* Scores with a difference below this share of the larger score are equal: 8 units of float32's
 * last place, for a reward summed from a few float32 numbers. */
#define SCORE_RESOLUTION 0x1p-20
enum { DEVIATION_OF_NONE, DEVIATION_OF_GROUP, DEVIATION_OF_ALL };

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
    uint8_t *out; /* destination of a copy */
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
    PyObject *keep; /* specs, and schemas of the borrowed dtypes */
};

/* specs: tuples (name, kind, optional, dtype or None, row sizes); then py_extras_clear. */
bool py_extras_read(struct extras *self, PyObject *specs, Py_ssize_t trajectories);
/* outs: uint8 [bytes] for each field. */
bool py_extras_read_destination(struct extras *self, PyObject *outs);
/* A list of (dtype or None, row sizes, rows per trajectory with -1 for a missing field). */
PyObject *py_extras_describe(const struct extras *self, Py_ssize_t trajectories);
/* Find the fields of trajectory i, which must be readable and hold `tokens` tokens. */
bool py_extras_find(struct extras *self, Py_ssize_t i, TrajectoryObject *t, uint64_t tokens);
void py_extras_clear(struct extras *self);
/* Copy rows of n tokens of sequence i, and its other rows with the first; no interpreter. */
void py_extras_copy(const struct extras *self, Py_ssize_t i, uint64_t from, uint64_t n);

/* ---- Field addresses of trajectories: found and checked here only, for every reader.
 *
 * Invariant: pointers filled in by py_find_source stay in the segment while the trajectories are
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

/* Bytes of an element, by its kind. */
extern const uint8_t py_element_bytes[];

/* Facts cached from the previous trajectory; all zeros at first. */
struct lookup {
    const SchemaObject *schema;
    const HolderObject *holder;
    uint16_t shape_at[FIELDS]; /* NO_FIELD if absent from the schema */
    uint8_t kinds[FIELDS];
    bool to_check; /* tokens of this kind may exceed the batch's int64 */
    /* Over the trajectories so far; a bit per field. */
    uint8_t has, lacks;
    bool rows; /* set once a sample has row lengths, hence several sequences */
    PyObject *field_names; /* a list to fill with the names of every schema, borrowed */
};
#define NO_FIELD UINT16_MAX

/* The slow paths of py_find_source: a new holder or schema, a non-trajectory, tokens to check, a
 * field longer or shorter than the tokens. On failure false with an exception naming the
 * mismatch. */
bool py_look_closer(struct lookup *lookup, PyObject *item, PyObject *const *names);
bool py_check_tokens(const struct source *source, PyObject *name);
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
    return !lookup->to_check || py_check_tokens(source, names[FIELD_TOKENS]);
}

void py_prefetch_trajectory(const PyObject *item);

/* ---- PackPlan: the samples of a batch, measured once for every copy.
 *
 * Invariants:
 * - Every length, dtype and bound is checked before a plan exists; values are checked while copied.
 * - A plan keeps its trajectories, whose space a copy by the host holds. */
/* Rows of the sample table. */
enum { SAMPLE_SCORE, SAMPLE_VERSION, SAMPLE_NEWEST, SAMPLE_TOKENS, SAMPLE_FACTS };
/* Bits of a sample's flags: no token trained; advantages of 0. */
enum { SAMPLE_MASKED = 1, SAMPLE_ZEROED = 2 };

typedef struct {
    PyObject_HEAD
    PyObject *trajectories; /* a list, never handed out: `sources` borrow its items */
    PyObject *sizes;        /* int64 [G] */
    PyObject *samples;      /* int64 [SAMPLE_FACTS, S]; a score as the bits of a double */
    PyObject *ids, *field_names;
    struct source *sources;
    struct record_ref *refs;
    struct extras extras;
    Py_ssize_t count;
    uint64_t total, longest, bytes;
    uint8_t has, lacks; /* a bit per field present in, or missing from a trajectory */
    bool has_logprobs, rows, metas, scores_fit;
} PackPlanObject;
extern PyTypeObject PackPlanType;

static inline const int64_t *py_plan_facts(const PackPlanObject *self, int row) {
    return (const int64_t *)PyArray_DATA((PyArrayObject *)self->samples) + row * self->count;
}
/* True for a plan that can be copied; false with an exception once the space of a trajectory may
 * belong to a newer record, or for more tokens than int32 borders index. */
bool py_plan_check(const PackPlanObject *self);
/* Read `advantages` float32 [S] and `flags` uint8 [S] or None. */
bool py_plan_read_samples(const PackPlanObject *self, PyObject *advantages, PyObject *flags,
                          const float **gains, const uint8_t **flags_at);
/* Words of a chunk in a kernel's table (kernel_table.c). */
enum {
    CHUNK_ADDRESSES = 0,  /* per field, at the chunk's first token; 0 if absent */
    CHUNK_START = FIELDS, /* in the batch */
    CHUNK_SPAN,           /* int32 [2]: first token of the sequence, number of tokens */
    CHUNK_ORDERS,         /* int32 flags, float32 advantage */
    CHUNK_SIGNATURE,      /* kinds of the present fields; the sort key of chunks */
    CHUNK_WORDS,
};
/* A chunk of a kernel's copy of extra fields, in words of `width` bytes: address, place, number of
 * words, 0. */
enum { COPY_ADDRESS, COPY_AT, COPY_WORDS_THERE, COPY_RESERVED, COPY_WORDS };
/* Methods for a kernel's copy, documented at their definitions. */
PyObject *py_plan_table_bytes(PackPlanObject *self, PyObject *chunk_tokens);
PyObject *py_plan_table(PackPlanObject *self, PyObject *args);
PyObject *py_plan_copy_table(PackPlanObject *self, PyObject *args);

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
    const uint8_t *flags; /* per sequence; NULL for zeros */
    const int32_t *borders;
    struct piece *pieces;
    uint32_t count;
    int64_t *tokens, *positions;
    uint8_t *mask;
    float *logprobs, *advantages;
    _Atomic bool wrong;
};

/* Copy `sequences` sequences of `total` tokens without the interpreter lock. Return 1 if masks hold
 * 0 and 1, logprobs and advantages are finite, and logprobs at most 0; otherwise 0; -1 with an
 * exception. */
int py_copy_job_run(struct copy_job *job, Py_ssize_t sequences, uint64_t total, uint32_t threads);

/* Registered by module.c. */
extern PyMethodDef py_arrays_functions[];
extern PyMethodDef py_scores_functions[];
