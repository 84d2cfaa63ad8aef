/* A kernel's table of a PackPlan.
 *
 * Invariants:
 * - A table copies no payload and holds no space: addresses stay valid while the caller keeps the
 *   trajectories leased.
 * - No write goes past the end of the caller's memory. */
#include "python/batch/batch.h"

/* The table, in one block of bytes; every part begins on a cache line:
 *
 *   found     int32 [WRONG_VALUES]: written by the kernel; 0 here
 *   borders   int32 [S + 1]: first token of every sequence in the batch
 *   versions  int64 [S], sizes int64 [G], scores float32 [S]
 *   chunks    int64 [C, CHUNK_WORDS], a line per chunk: up to chunk_tokens tokens of a sequence
 *
 * A chunk tells a kernel everything about its move, since a further read would cost another trip to
 * the host. Chunks of sequences with the same fields and dtypes are adjacent. The parts between
 * `found` and the chunks go to the batch unchanged. */
/* Words of `found`, not 0 for a wrong value: mask, logprob, advantage. */
#define WRONG_VALUES 3
#define CHUNK_BYTES (CHUNK_WORDS * sizeof(int64_t))
_Static_assert(CHUNK_BYTES == SHMBUS_RECORD_ALIGN, "a chunk is a cache line");

struct layout {
    uint64_t found_at, borders_at, versions_at, sizes_at, scores_at, chunks_at, end;
};

struct table {
    const PackPlanObject *plan;
    struct layout at;
    uint8_t *memory;
    int64_t shift;
    uint64_t chunk_tokens, chunks;
    const float *gains;
    const uint8_t *flags;
    uint32_t signature; /* of the first sample */
    bool mixed;
};

static uint64_t after(uint64_t at, uint64_t count, size_t size) {
    return shmbus_align_up(at + count * size, SHMBUS_RECORD_ALIGN);
}

static uint64_t count_groups(const PackPlanObject *plan) {
    return (uint64_t)PyArray_SIZE((PyArrayObject *)plan->sizes);
}

static struct layout lay_out(const PackPlanObject *plan, uint64_t chunk_tokens) {
    const uint64_t sequences = (uint64_t)plan->count;
    struct layout at = {.found_at = 0};
    at.borders_at = after(at.found_at, WRONG_VALUES, sizeof(int32_t));
    at.versions_at = after(at.borders_at, sequences + 1, sizeof(int32_t));
    at.sizes_at = after(at.versions_at, sequences, sizeof(int64_t));
    at.scores_at = after(at.sizes_at, count_groups(plan), sizeof(int64_t));
    at.chunks_at = after(at.scores_at, sequences, sizeof(float));
    uint64_t chunks = 0;
    for (Py_ssize_t i = 0; i < plan->count; i++) {
        chunks += (plan->sources[i].length + chunk_tokens - 1) / chunk_tokens;
    }
    at.end = at.chunks_at + chunks * CHUNK_BYTES;
    return at;
}

static void write_facts(const struct table *self) {
    const PackPlanObject *plan = self->plan;
    const size_t count = (size_t)plan->count;
    int32_t *borders = (int32_t *)(self->memory + self->at.borders_at);
    float *scores = (float *)(self->memory + self->at.scores_at);
    memset(self->memory + self->at.found_at, 0, self->at.borders_at);
    memcpy(self->memory + self->at.versions_at, py_plan_facts(plan, SAMPLE_VERSION),
           count * sizeof(int64_t));
    memcpy(self->memory + self->at.sizes_at, PyArray_DATA((PyArrayObject *)plan->sizes),
           count_groups(plan) * sizeof(int64_t));
    borders[0] = 0;
    for (size_t i = 0; i < count; i++) {
        double score;
        memcpy(&score, py_plan_facts(plan, SAMPLE_SCORE) + i, sizeof score);
        scores[i] = (float)score;
        borders[i + 1] = borders[i] + (int32_t)plan->sources[i].length;
    }
}

static int64_t *chunks_of(const struct table *self) {
    return (int64_t *)(self->memory + self->at.chunks_at);
}

/* Two separate stores: a full-word load would stall on two halves just written. */
static void put_halves(int64_t *word, const void *first, const void *second) {
    memcpy(word, first, sizeof(int32_t));
    memcpy((uint8_t *)word + sizeof(int32_t), second, sizeof(int32_t));
}

/* Kinds of the present fields, tokens first; 0xff for an absent field. */
static uint32_t signature_of(const struct source *source) {
    uint32_t signature = 0;
    for (int f = 0; f < FIELDS; f++) {
        signature = signature << 8 | (source->data[f] == NULL ? 0xffu : source->kinds[f]);
    }
    return signature;
}

/* Cut one sequence into chunks. */
static void cut(struct table *self, Py_ssize_t sequence, uint64_t start) {
    const struct source *source = &self->plan->sources[sequence];
    int64_t address[FIELDS], step[FIELDS];
    for (int f = 0; f < FIELDS; f++) {
        bool there = source->data[f] != NULL;
        address[f] = there ? (int64_t)(uintptr_t)source->data[f] + self->shift : 0;
        step[f] = there ? (int64_t)self->chunk_tokens * py_element_bytes[source->kinds[f]] : 0;
    }
    const int32_t flags = self->flags == NULL ? 0 : self->flags[sequence];
    const uint64_t n = source->length, most = self->chunk_tokens;
    const uint32_t signature = signature_of(source);
    int64_t *chunk = chunks_of(self) + self->chunks * CHUNK_WORDS;
    for (uint64_t first = 0; first < n; first += most, chunk += CHUNK_WORDS) {
        for (int f = 0; f < FIELDS; f++) {
            chunk[CHUNK_ADDRESSES + f] = address[f];
            address[f] += step[f];
        }
        chunk[CHUNK_START] = (int64_t)(start + first);
        const int32_t from = (int32_t)first, count = (int32_t)(n - first < most ? n - first : most);
        put_halves(&chunk[CHUNK_SPAN], &from, &count);
        put_halves(&chunk[CHUNK_ORDERS], &flags, &self->gains[sequence]);
        chunk[CHUNK_SIGNATURE] = signature;
        self->chunks++;
    }
    self->signature = sequence == 0 ? signature : self->signature;
    self->mixed |= signature != self->signature;
}

/* The device reads one mapping only. */
static bool in_one_mapping(const PackPlanObject *plan) {
    for (Py_ssize_t i = 1; i < plan->count; i++) {
        if (plan->sources[i].trajectory->holder->segment !=
            plan->sources[0].trajectory->holder->segment) {
            return py_refuse(PyExc_ValueError,
                             "table: expected trajectories of one Consumer, got several's");
        }
    }
    return true;
}

/* Append one launch per signature: (first chunk, chunks, (kind per field, -1 if absent)). */
static bool add_launch(PyObject *launches, uint64_t first, uint64_t chunks, uint64_t word) {
    int kinds[FIELDS];
    for (int f = FIELDS - 1; f >= 0; f--, word >>= 8) {
        kinds[f] = (word & 0xff) == 0xff ? -1 : (int)(word & 0xff);
    }
    return py_append(launches, Py_BuildValue("(KK(iiii))", U64(first), U64(chunks), kinds[0],
                                             kinds[1], kinds[2], kinds[3]));
}

/* Stable sort of chunks by signature, in order of first appearance. */
static bool put_in_order(struct table *self, PyObject *launches) {
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
        good = add_launch(launches, sorted, same, (uint64_t)signature);
        sorted += same;
        left = other;
    }
    PyMem_Free(rest);
    return good;
}

/* table_bytes(chunk_tokens) -> size of the table. */
PyObject *py_plan_table_bytes(PackPlanObject *self, PyObject *chunk_tokens) {
    const uint64_t most = PyLong_AsUnsignedLongLong(chunk_tokens);
    if (most == 0 || PyErr_Occurred() != NULL) {
        return PyErr_Occurred() != NULL
                   ? NULL
                   : PyErr_Format(PyExc_ValueError, "table: expected chunks of 1 token or more");
    }
    return PyLong_FromUnsignedLongLong(lay_out(self, most).end);
}

/* table(memory uint8 [n], shift, chunk_tokens, advantages float32 [S], flags uint8 [S] or None) ->
 * (found_at, borders_at, versions_at, sizes_at, scores_at, chunks_at, launches): writes the table,
 * with shifted addresses. */
PyObject *py_plan_table(PackPlanObject *self, PyObject *args) {
    PyObject *memory, *advantages, *flags;
    long long shift;
    unsigned int chunk_tokens;
    struct table table = {.plan = self};
    if (!PyArg_ParseTuple(args, "OLIOO", &memory, &shift, &chunk_tokens, &advantages, &flags) ||
        !py_plan_check(self) || !in_one_mapping(self) ||
        !py_plan_read_samples(self, advantages, flags, &table.gains, &table.flags)) {
        return NULL;
    }
    const uint64_t room = py_array_elements(memory);
    if (!py_check_array(memory, "memory", NPY_UINT8, room, true, &table.memory)) {
        return NULL;
    }
    if (chunk_tokens == 0 || (uintptr_t)table.memory % sizeof(int64_t) != 0) {
        return PyErr_Format(PyExc_ValueError, "table: expected chunks of 1 token or more, and "
                                              "memory on a word's border");
    }
    table.at = lay_out(self, chunk_tokens);
    if (room < table.at.end) {
        return PyErr_Format(PyExc_ValueError, "memory: expected uint8 [%llu] or more, got %R",
                            U64(table.at.end), memory);
    }
    table.shift = shift;
    table.chunk_tokens = chunk_tokens;
    write_facts(&table);
    uint64_t start = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        cut(&table, i, start);
        start += self->sources[i].length;
    }
    PyObject *launches = PyList_New(0);
    const bool good = launches != NULL &&
                      (table.chunks == 0 ||
                       (table.mixed ? put_in_order(&table, launches)
                                    : add_launch(launches, 0, table.chunks, table.signature)));
    const struct layout *at = &table.at;
    PyObject *result = good ? Py_BuildValue("KKKKKKO", U64(at->found_at), U64(at->borders_at),
                                            U64(at->versions_at), U64(at->sizes_at),
                                            U64(at->scores_at), U64(at->chunks_at), launches)
                            : NULL;
    Py_XDECREF(launches);
    return result;
}
