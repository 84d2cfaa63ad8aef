/* The gather table of a kernel, built in one pass over the trajectories of a batch's groups. The
 * trajectories lie outside the near caches, and reaching them dominates the cost of planning.
 *
 * Invariants:
 * - Planning copies no payload and holds no space: addresses stay valid while the caller keeps the
 *   trajectories leased.
 * - No write goes past the end of the caller's memory. */
#include "python/batch/batch.h"

#include <math.h>
#include <string.h>

#include "python/group/group.h"

/* The table, in one block of bytes; every part begins on a cache line:
 *
 *   found     int32 [2]: written by the kernel; 0 here
 *   borders   int32 [S + 1]: first token of every sequence in the batch
 *   versions  int64 [S], sizes int64 [G], scores float32 [S]
 *   chunks    int64 [C, CHUNK_WORDS], a line per chunk: up to chunk_tokens tokens of a sequence
 *
 * A chunk tells a kernel everything about its move, since a further read would cost another trip to
 * the host. Chunks of sequences with the same fields and dtypes are adjacent. The parts between
 * `found` and the chunks go to the batch unchanged. */
enum {
    CHUNK_ADDRESSES = 0,  /* per field, at the chunk's first token; 0 if absent */
    CHUNK_START = FIELDS, /* in the batch */
    CHUNK_SPAN,           /* int32 [2]: first token of the sequence, number of tokens */
    CHUNK_ORDERS,         /* int32 flags, float32 advantage */
    CHUNK_SIGNATURE,      /* kinds of the present fields; the sort key of chunks */
    CHUNK_WORDS,
};
#define CHUNK_BYTES (CHUNK_WORDS * sizeof(int64_t))
_Static_assert(CHUNK_BYTES == SHMBUS_RECORD_ALIGN, "a chunk is a cache line");

#define KNOWN_WORDS 4

struct table {
    uint64_t found_at, borders_at, versions_at, sizes_at, scores_at, chunks_at;
};

/* A group's samples, borrowed, and their number when counted. */
struct members {
    PyObject *samples;
    int64_t size;
};

struct plan {
    /* The request. */
    PyObject *names[FIELDS], *words;
    uint8_t *memory;
    uint64_t room, chunk_tokens;
    int64_t shift;
    const float *advantages;
    const uint8_t *flags; /* NULL for zeros */
    /* Progress. */
    struct lookup lookup;
    uint32_t spans; /* nonzero if a sample spans several policy versions */
    const SegmentObject *segment;
    struct table table;
    struct members *members; /* per group */
    uint64_t groups, sequences, done; /* sequences: over the groups; done: seen so far */
    uint64_t tokens, longest, chunks;
    uint32_t signature; /* of the first trajectory */
    bool mixed;
    PyObject *ids, *mentions, *launches;
    PyObject *known; /* bytes: facts kept on the host, see write_known */
};

static uint64_t after(uint64_t at, uint64_t count, size_t size) {
    return shmbus_align_up(at + count * size, SHMBUS_RECORD_ALIGN);
}

static struct table lay_table(uint64_t sequences, uint64_t groups) {
    struct table table = {.found_at = 0};
    table.borders_at = after(table.found_at, 2, sizeof(int32_t));
    table.versions_at = after(table.borders_at, sequences + 1, sizeof(int32_t));
    table.sizes_at = after(table.versions_at, sequences, sizeof(int64_t));
    table.scores_at = after(table.sizes_at, groups, sizeof(int64_t));
    table.chunks_at = after(table.scores_at, sequences, sizeof(float));
    return table;
}

static bool facts_fit(const struct plan *self) {
    return self->room >= self->table.chunks_at;
}

static uint64_t table_bytes(const struct plan *self) {
    return self->table.chunks_at + self->chunks * CHUNK_BYTES;
}

static void write_facts(const struct plan *self, const TrajectoryObject *t) {
    if (facts_fit(self)) {
        uint8_t *memory = self->memory;
        ((int32_t *)(memory + self->table.borders_at))[self->done] = (int32_t)self->tokens;
        ((int64_t *)(memory + self->table.versions_at))[self->done] = t->policy_version;
        ((float *)(memory + self->table.scores_at))[self->done] = (float)t->score;
    }
}

/* Facts per sample: int64 [4, S] of score (the bits of a double), policy version, newest version,
 * tokens; then the group sizes: int64 [G]. */
static void write_known(const struct plan *self, const TrajectoryObject *t, uint64_t length) {
    int64_t words[KNOWN_WORDS] = {0, t->policy_version,
                                  t->policy_version + (int64_t)t->version_span, (int64_t)length};
    memcpy(&words[0], &t->score, sizeof t->score);
    char *at = PyBytes_AS_STRING(self->known) + self->done * sizeof *words;
    for (int i = 0; i < KNOWN_WORDS; i++, at += self->sequences * sizeof *words) {
        memcpy(at, &words[i], sizeof *words);
    }
}

static const uint8_t element_bytes[] = {
    [ELEMENT_BOOL] = 1, [ELEMENT_I8] = 1,  [ELEMENT_U8] = 1,  [ELEMENT_I16] = 2,
    [ELEMENT_U16] = 2,  [ELEMENT_I32] = 4, [ELEMENT_U32] = 4, [ELEMENT_I64] = 8,
    [ELEMENT_U64] = 8,  [ELEMENT_F32] = 4, [ELEMENT_F64] = 8,
};

static int64_t *chunks_of(const struct plan *self) {
    return (int64_t *)(self->memory + self->table.chunks_at);
}

/* Two separate stores: a full-word load would stall on two halves just written. */
static void put_halves(int64_t *word, const void *first, const void *second) {
    memcpy(word, first, sizeof(int32_t));
    memcpy((uint8_t *)word + sizeof(int32_t), second, sizeof(int32_t));
}

/* Cut one sequence into chunks; chunks without room are only counted. */
static void cut(struct plan *self, const struct source *source, float advantage) {
    int64_t address[FIELDS], step[FIELDS];
    for (int f = 0; f < FIELDS; f++) {
        bool there = source->data[f] != NULL;
        address[f] = there ? (int64_t)(uintptr_t)source->data[f] + self->shift : 0;
        step[f] = there ? (int64_t)self->chunk_tokens * element_bytes[source->kinds[f]] : 0;
    }
    const int32_t flags = self->flags == NULL ? 0 : self->flags[self->done];
    const uint64_t n = source->length, most = self->chunk_tokens, start = self->tokens;
    const int64_t signature = (int64_t)self->lookup.signature;
    int64_t *chunk = chunks_of(self) + self->chunks * CHUNK_WORDS;
    for (uint64_t first = 0; first < n; first += most) {
        self->chunks++;
        if (table_bytes(self) > self->room) {
            continue;
        }
        for (int f = 0; f < FIELDS; f++) {
            chunk[CHUNK_ADDRESSES + f] = address[f];
            address[f] += step[f];
        }
        chunk[CHUNK_START] = (int64_t)(start + first);
        const int32_t from = (int32_t)first, count = (int32_t)(n - first < most ? n - first : most);
        put_halves(&chunk[CHUNK_SPAN], &from, &count);
        put_halves(&chunk[CHUNK_ORDERS], &flags, &advantage);
        chunk[CHUNK_SIGNATURE] = signature;
        chunk += CHUNK_WORDS;
    }
    self->mixed |= self->lookup.signature != self->signature;
}

/* The device reads one mapping only. */
static bool in_one_mapping(struct plan *self, const TrajectoryObject *t) {
    const SegmentObject *segment = t->holder->segment;
    self->segment = self->segment == NULL ? segment : self->segment;
    if (self->segment != segment) {
        PyErr_SetString(PyExc_ValueError,
                        "plan_gather: expected trajectories of one Consumer, got several's");
    }
    return self->segment == segment;
}

static bool plan_sample(struct plan *self, PyObject *item) {
    struct source source;
    if (!py_find_source(&self->lookup, item, self->names, &source)) {
        return false;
    }
    TrajectoryObject *t = source.trajectory;
    if (!in_one_mapping(self, t) || !py_batch_fits(self->tokens + source.length) ||
        (t->meta_bytes > 0 && py_meta_mentions(t, self->words) &&
         !py_append_number(self->mentions, (Py_ssize_t)self->done))) {
        return false;
    }
    self->signature = self->done == 0 ? self->lookup.signature : self->signature;
    write_facts(self, t);
    write_known(self, t, source.length);
    self->spans |= t->version_span;
    cut(self, &source, self->advantages[self->done]);
    PyList_SET_ITEM(self->ids, (Py_ssize_t)self->done, Py_NewRef(t->instance_id));
    self->tokens += source.length;
    self->longest = source.length > self->longest ? source.length : self->longest;
    self->done++;
    return true;
}

/* Only Python code run by the field lookup could have changed the groups. */
static bool still(bool unchanged) {
    if (!unchanged) {
        PyErr_SetString(PyExc_RuntimeError, "plan_gather: groups changed while they were read");
    }
    return unchanged;
}

/* Prefetch the sample list of the group after next, and the trajectories of the next. */
static void look_ahead(const struct plan *self, uint64_t from) {
    if (from + 2 < self->groups) {
        __builtin_prefetch(((PyListObject *)self->members[from + 2].samples)->ob_item);
    }
    if (from + 1 < self->groups) {
        PyObject *samples = self->members[from + 1].samples;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(samples); i++) {
            py_prefetch_trajectory(PyList_GET_ITEM(samples, i));
        }
    }
}

static void write_sizes(const struct plan *self) {
    char *at = PyBytes_AS_STRING(self->known) + KNOWN_WORDS * self->sequences * sizeof(int64_t);
    for (uint64_t i = 0; i < self->groups; i++, at += sizeof(int64_t)) {
        memcpy(at, &self->members[i].size, sizeof(int64_t));
    }
    if (facts_fit(self)) {
        int64_t *sizes = (int64_t *)(self->memory + self->table.sizes_at);
        for (uint64_t i = 0; i < self->groups; i++) {
            sizes[i] = self->members[i].size;
        }
        memset(self->memory + self->table.found_at, 0, self->table.borders_at);
        ((int32_t *)(self->memory + self->table.borders_at))[self->done] = (int32_t)self->tokens;
    }
}

static bool plan_groups(struct plan *self) {
    for (uint64_t number = 0; number < self->groups; number++) {
        PyObject *samples = self->members[number].samples;
        Py_ssize_t size = (Py_ssize_t)self->members[number].size;
        look_ahead(self, number);
        if (!still(PyList_GET_SIZE(samples) == size)) {
            return false;
        }
        for (Py_ssize_t i = 0; i < size; i++) {
            if (!still(i < PyList_GET_SIZE(samples)) ||
                !plan_sample(self, PyList_GET_ITEM(samples, i))) {
                return false;
            }
        }
    }
    write_sizes(self);
    return true;
}

/* Append one launch per signature: (first chunk, chunks, (kind per field, -1 if absent)). */
static bool add_launch(PyObject *launches, uint64_t first, uint64_t chunks, uint64_t word) {
    int kinds[FIELDS];
    for (int f = FIELDS - 1; f >= 0; f--, word >>= 8) {
        kinds[f] = (word & 0xff) == 0xff ? -1 : (int)(word & 0xff);
    }
    PyObject *launch = Py_BuildValue("(KK(iiii))", U64(first), U64(chunks), kinds[0], kinds[1],
                                     kinds[2], kinds[3]);
    bool added = launch != NULL && PyList_Append(launches, launch) == 0;
    Py_XDECREF(launch);
    return added;
}

/* Stable sort of chunks by signature, in order of first appearance. */
static bool put_in_order(struct plan *self) {
    int64_t *chunks = chunks_of(self), *rest = PyMem_Malloc(self->chunks * CHUNK_BYTES);
    if (rest == NULL) {
        PyErr_NoMemory();
        return false;
    }
    uint64_t sorted = 0;
    bool good = true;
    for (uint64_t left = self->chunks; good && left > 0;) {
        int64_t *first = chunks + sorted * CHUNK_WORDS;
        int64_t signature = first[CHUNK_SIGNATURE];
        uint64_t same = 0, other = 0;
        for (uint64_t i = 0; i < left; i++) {
            int64_t *chunk = first + i * CHUNK_WORDS;
            int64_t *to = chunk[CHUNK_SIGNATURE] == signature ? first + same++ * CHUNK_WORDS
                                                              : rest + other++ * CHUNK_WORDS;
            memmove(to, chunk, CHUNK_BYTES);
        }
        memcpy(first + same * CHUNK_WORDS, rest, other * CHUNK_BYTES);
        good = add_launch(self->launches, sorted, same, (uint64_t)signature);
        sorted += same;
        left = other;
    }
    PyMem_Free(rest);
    return good;
}

static bool make_launches(struct plan *self) {
    if (self->chunks == 0 || table_bytes(self) > self->room) {
        return true;
    }
    return self->mixed ? put_in_order(self)
                       : add_launch(self->launches, 0, self->chunks,
                                    (uint64_t)chunks_of(self)[CHUNK_SIGNATURE]);
}

/* Count the samples per group; false with an exception. */
static bool count_sequences(struct plan *self, PyObject *groups) {
    self->members = PyMem_Malloc((self->groups + 1) * sizeof *self->members);
    for (uint64_t i = 0; self->members != NULL && i < self->groups; i++) {
        PyObject *samples = py_group_samples(PyTuple_GET_ITEM(groups, (Py_ssize_t)i));
        if (samples == NULL) {
            return false;
        }
        int64_t size = PyList_GET_SIZE(samples);
        self->members[i] = (struct members){samples, size};
        self->sequences += (uint64_t)size;
    }
    if (self->members == NULL) {
        PyErr_NoMemory();
        return false;
    }
    if (self->sequences == 0) {
        PyErr_SetString(PyExc_ValueError, "plan_gather: expected at least one trajectory");
    }
    return self->sequences > 0;
}

static PyObject *make_result(const struct plan *self) {
    const struct table *t = &self->table;
    const unsigned long long facts[] = {table_bytes(self), self->tokens,   self->longest,
                                        t->found_at,       t->borders_at,  t->versions_at,
                                        t->sizes_at,       t->scores_at,   t->chunks_at};
    return Py_BuildValue("KKKKKKKKKOOOOOOii", facts[0], facts[1], facts[2], facts[3], facts[4],
                         facts[5], facts[6], facts[7], facts[8], self->launches, self->ids,
                         self->known, self->mentions, self->lookup.rows ? Py_True : Py_False,
                         self->spans ? Py_True : Py_False, self->lookup.has, self->lookup.lacks);
}

/* `self` already holds the request except the arguments per sequence. */
static PyObject *plan_all(struct plan *self, PyObject *groups, PyObject *advantages,
                          PyObject *flags) {
    PyObject *result = NULL;
    if (count_sequences(self, groups) &&
        py_check_array(advantages, "advantages", NPY_FLOAT32, self->sequences, false,
                       &self->advantages) &&
        (flags == Py_None ||
         py_check_array(flags, "flags", NPY_UINT8, self->sequences, false, &self->flags))) {
        self->table = lay_table(self->sequences, self->groups);
        self->ids = PyList_New((Py_ssize_t)self->sequences);
        self->mentions = PyList_New(0);
        self->launches = PyList_New(0);
        uint64_t words = KNOWN_WORDS * self->sequences + self->groups;
        self->known = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(words * sizeof(int64_t)));
        if (self->known != NULL && self->ids != NULL && self->mentions != NULL && self->launches != NULL &&
            plan_groups(self) && make_launches(self)) {
            result = make_result(self);
        }
        Py_CLEAR(self->ids);
        Py_CLEAR(self->mentions);
        Py_CLEAR(self->launches);
        Py_CLEAR(self->known);
    }
    PyMem_Free(self->members);
    return result;
}

/* plan_gather(groups, names, memory uint8 [n], shift, chunk_tokens, advantages float32 [S], flags
 * uint8 [S] or None, words) -> (bytes, tokens, longest, found_at, borders_at, versions_at,
 * sizes_at, scores_at, chunks_at, launches, instance_ids, known, mentions, has_rows, has_spans,
 * fields present in a trajectory, fields missing from a trajectory): the table, with shifted
 * addresses. Memory smaller than `bytes` yields no launches and undefined contents. */
static PyObject *py_plan_gather(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *groups, *memory, *advantages, *flags;
    long long shift;
    unsigned int chunk_tokens;
    struct plan self = {.done = 0};
    if (!PyArg_ParseTuple(args, "O!(OOOO)OLIOOO", &PyTuple_Type, &groups, &self.names[0],
                          &self.names[1], &self.names[2], &self.names[3], &memory, &shift,
                          &chunk_tokens, &advantages, &flags, &self.words) ||
        !py_check_words(self.words)) {
        return NULL;
    }
    self.room = py_array_elements(memory);
    if (!py_check_array(memory, "memory", NPY_UINT8, self.room, true, &self.memory)) {
        return NULL;
    }
    if (chunk_tokens == 0 || (uintptr_t)self.memory % sizeof(int64_t) != 0) {
        return PyErr_Format(PyExc_ValueError,
                            "plan_gather: expected chunks of 1 token or more, and "
                            "memory on a word's border");
    }
    self.shift = shift;
    self.chunk_tokens = chunk_tokens;
    self.groups = (uint64_t)PyTuple_GET_SIZE(groups);
    return plan_all(&self, groups, advantages, flags);
}

/* Map every kind number of the table to its numpy name. */
static PyObject *kind_names(void) {
    return Py_BuildValue("(sssssssssss)", "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4",
                         "f8");
}
_Static_assert(ELEMENT_BOOL == 0 && ELEMENT_U64 == 8 && ELEMENT_F32 == 9 && ELEMENT_F64 == 10,
               "kind_names has them in this order");

bool py_gather_plan_add_objects(PyObject *module) {
    return py_add_object(module, "ELEMENT_KINDS", kind_names()) &&
           py_add_object(module, "MAX_SCORE", PyFloat_FromDouble(MAX_SCORE)) &&
           py_add_object(module, "MAX_LOGPROB", PyFloat_FromDouble((double)MAX_LOGPROB));
}

/* ---- Facts of trajectories before a batch is made: checked, counted, described.
 *
 * Invariant: no payload is copied or held. */
/* measure(trajectories, names) -> (tokens per trajectory, fields present in a trajectory, fields
 * missing from a trajectory, names of every schema, True if the scores are comparable), after the
 * checks of pack. */
static PyObject *py_measure(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *items, *names[FIELDS];
    if (!PyArg_ParseTuple(args, "O!(OOOO)", &PyList_Type, &items, &names[0], &names[1], &names[2],
                          &names[3])) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(items);
    struct source *sources = PyMem_Malloc((size_t)(count + 1) * sizeof *sources);
    if (sources == NULL) {
        return PyErr_NoMemory();
    }
    struct lookup lookup = {.schema = NULL, .field_names = PyList_New(0)};
    PyObject *lengths = lookup.field_names != NULL &&
                                py_find_sources(&lookup, items, names, sources)
                            ? PyList_New(count)
                            : NULL;
    bool scores_fit = true;
    for (Py_ssize_t i = 0; lengths != NULL && i < count; i++) {
        scores_fit &= fabs(sources[i].trajectory->score) <= MAX_SCORE; /* false for a nan */
        py_list_set(&lengths, i, PyLong_FromUnsignedLongLong(sources[i].length));
    }
    PyMem_Free(sources);
    PyObject *result = lengths == NULL ? NULL
                                       : Py_BuildValue("OiiOO", lengths, lookup.has, lookup.lacks,
                                                       lookup.field_names,
                                                       scores_fit ? Py_True : Py_False);
    Py_XDECREF(lengths);
    Py_XDECREF(lookup.field_names);
    return result;
}

/* scores(trajectories) -> float64 [S]; every trajectory must have a score. */
static PyObject *py_scores(PyObject *Py_UNUSED(module), PyObject *items) {
    if (!PyList_Check(items)) {
        return PyErr_Format(PyExc_TypeError, "scores: expected a list of trajectories");
    }
    npy_intp count = PyList_GET_SIZE(items);
    PyObject *scores = PyArray_SimpleNew(1, &count, NPY_FLOAT64);
    for (npy_intp i = 0; scores != NULL && i < count; i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        const TrajectoryObject *t = (const TrajectoryObject *)item;
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                         Py_TYPE(item)->tp_name);
            Py_CLEAR(scores);
        } else if (isnan(t->score) && !py_trajectory_require_score(t)) {
            Py_CLEAR(scores);
        } else {
            ((double *)PyArray_DATA((PyArrayObject *)scores))[i] = t->score;
        }
    }
    return scores;
}

PyMethodDef py_gather_plan_functions[] = {
    {"plan_gather", py_plan_gather, METH_VARARGS, NULL},
    {"scores", py_scores, METH_O, NULL},
    {"measure", py_measure, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct named_value py_gather_plan_constants[] = {
    {"CHUNK_WORDS", CHUNK_WORDS},
    {"HAS_LOGPROBS", 1 << FIELD_LOGPROBS},
    {NULL, 0},
};
