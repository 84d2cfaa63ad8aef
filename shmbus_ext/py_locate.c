/* For who reads records by other means than the gather here: the table that a kernel gathers by,
 * and looks at bytes that would be slow from Python.
 *
 * Invariant: nothing here copies a payload or holds space: addresses are good for as long as the
 * trajectories are leased, and who uses them sees to that. */
#define _GNU_SOURCE /* memmem */
#include "py_sources.h"

#include <string.h>

/* The table, in one block of bytes; each part begins on a cache line:
 *
 *   chunks    int64 [C, CHUNK_WORDS], a line each: chunk_tokens tokens of a sequence, or its rest
 *   found     int32 [2]: what the kernel tells; 0 here
 *   borders   int32 [S + 1]: where each sequence begins in the batch
 *   versions  int64 [S], sizes int64 [G], scores float32 [S]
 *
 * A chunk says all that a kernel needs to move it, since each further read would be another way to
 * the host and back. Chunks of sequences that have the same fields, of the same dtypes, lie behind
 * each other. What follows `found` goes to the batch as it is. */
enum {
    CHUNK_ADDRESSES = 0,  /* of each field, at the chunk's first token; 0 where there is none */
    CHUNK_START = FIELDS, /* in the batch */
    CHUNK_SPAN,           /* int32 [2]: first token of the sequence, and how many */
    CHUNK_ORDERS,         /* int32 flags, float32 advantage */
    CHUNK_UNUSED,
    CHUNK_WORDS,
};
_Static_assert(CHUNK_WORDS * sizeof(int64_t) == SHMBUS_RECORD_ALIGN, "a chunk is a cache line");

/* What the caller says of sequences and groups. */
struct told {
    const float *advantages;
    const uint8_t *flags; /* NULL where all are 0 */
    const double *scores;
    const int64_t *versions, *sizes;
    uint64_t groups;
};

struct table {
    uint64_t tokens, longest, chunks;
    uint64_t found_at, borders_at, versions_at, sizes_at, scores_at, bytes;
};

static uint64_t after(uint64_t at, uint64_t count, size_t size) {
    return shmbus_align_up(at + count * size, SHMBUS_RECORD_ALIGN);
}

static struct table lay_table(const struct source *sources, uint64_t count, uint64_t groups,
                              uint64_t chunk_tokens) {
    struct table table = {0};
    for (uint64_t i = 0; i < count; i++) {
        uint64_t tokens = sources[i].length;
        table.tokens += tokens;
        table.longest = tokens > table.longest ? tokens : table.longest;
        table.chunks += tokens / chunk_tokens + (tokens % chunk_tokens != 0);
    }
    table.found_at = table.chunks * CHUNK_WORDS * sizeof(int64_t);
    table.borders_at = after(table.found_at, 2, sizeof(int32_t));
    table.versions_at = after(table.borders_at, count + 1, sizeof(int32_t));
    table.sizes_at = after(table.versions_at, count, sizeof(int64_t));
    table.scores_at = after(table.sizes_at, groups, sizeof(int64_t));
    table.bytes = after(table.scores_at, count, sizeof(float));
    return table;
}

static void fill_facts(const struct source *sources, uint64_t count, const struct told *told,
                       uint8_t *memory, const struct table *table) {
    int32_t *borders = (int32_t *)(memory + table->borders_at);
    float *scores = (float *)(memory + table->scores_at);
    int32_t start = 0;
    memset(memory + table->found_at, 0, table->borders_at - table->found_at);
    for (uint64_t i = 0; i < count; i++) {
        borders[i] = start;
        start += (int32_t)sources[i].length;
        scores[i] = (float)told->scores[i];
    }
    borders[count] = start;
    memcpy(memory + table->versions_at, told->versions, count * sizeof(int64_t));
    memcpy(memory + table->sizes_at, told->sizes, told->groups * sizeof(int64_t));
}

static const uint8_t element_bytes[] = {
    [ELEMENT_BOOL] = 1, [ELEMENT_I8] = 1,  [ELEMENT_U8] = 1,  [ELEMENT_I16] = 2,
    [ELEMENT_U16] = 2,  [ELEMENT_I32] = 4, [ELEMENT_U32] = 4, [ELEMENT_I64] = 8,
    [ELEMENT_U64] = 8,  [ELEMENT_F32] = 4, [ELEMENT_F64] = 8,
};

/* Cut one sequence into chunks; returns where the next one goes. */
static int64_t *cut(const struct source *source, uint64_t chunk_tokens, int64_t shift,
                    int32_t start, const int32_t orders[2], int64_t *chunk) {
    for (uint64_t first = 0; first < source->length; first += chunk_tokens) {
        for (int f = 0; f < FIELDS; f++) {
            const uint8_t *data = source->data[f];
            uint64_t before = data == NULL ? 0 : first * element_bytes[source->kinds[f]];
            chunk[CHUNK_ADDRESSES + f] =
                data == NULL ? 0 : (int64_t)(uintptr_t)(data + before) + shift;
        }
        uint64_t left = source->length - first;
        const int32_t span[2] = {(int32_t)first,
                                 (int32_t)(left < chunk_tokens ? left : chunk_tokens)};
        chunk[CHUNK_START] = start + (int64_t)first;
        memcpy(&chunk[CHUNK_SPAN], span, sizeof span);
        memcpy(&chunk[CHUNK_ORDERS], orders, sizeof span);
        chunk[CHUNK_UNUSED] = 0;
        chunk += CHUNK_WORDS;
    }
    return chunk;
}

/* Which fields a trajectory has, and their kinds, in one word. */
static uint32_t signature(const struct source *source) {
    uint32_t word = 0;
    for (int f = 0; f < FIELDS; f++) {
        word = word << 8 | (source->data[f] == NULL ? 0xffu : source->kinds[f]);
    }
    return word;
}

/* (first chunk, chunks, (kind of each field, -1 where there is none)), one for each signature. */
static bool add_launch(PyObject *launches, uint64_t first, uint64_t chunks, uint32_t word) {
    int kinds[FIELDS];
    for (int f = FIELDS - 1; f >= 0; f--, word >>= 8) {
        kinds[f] = (word & 0xff) == 0xff ? -1 : (int)(word & 0xff);
    }
    PyObject *launch =
        Py_BuildValue("(KK(iiii))", (unsigned long long)first, (unsigned long long)chunks,
                      kinds[0], kinds[1], kinds[2], kinds[3]);
    bool added = launch != NULL && PyList_Append(launches, launch) == 0;
    Py_XDECREF(launch);
    return added;
}

/* Cut all sequences into chunks: those of the first signature, of the next one that is met, ... */
static bool fill_chunks(const struct source *sources, uint64_t count, uint64_t chunk_tokens,
                        int64_t shift, const struct told *told, const int32_t *borders,
                        int64_t *memory, PyObject *launches) {
    uint64_t done = 0;
    int64_t *chunk = memory;
    for (uint64_t first = 0; done < count; first++) {
        uint32_t word = signature(&sources[first]);
        bool met = false;
        for (uint64_t i = 0; i < first && !met; i++) {
            met = signature(&sources[i]) == word;
        }
        if (met) {
            continue;
        }
        int64_t *before = chunk;
        for (uint64_t i = first; i < count; i++) {
            if (signature(&sources[i]) != word) {
                continue;
            }
            done++;
            int32_t orders[2] = {told->flags == NULL ? 0 : told->flags[i], 0};
            memcpy(&orders[1], &told->advantages[i], sizeof(float));
            chunk = cut(&sources[i], chunk_tokens, shift, borders[i], orders, chunk);
        }
        if (chunk > before && !add_launch(launches, (uint64_t)(before - memory) / CHUNK_WORDS,
                                          (uint64_t)(chunk - before) / CHUNK_WORDS, word)) {
            return false;
        }
    }
    return true;
}

/* Whether all lie in one mapping; the device reads no other. */
static bool in_one_mapping(const struct source *sources, Py_ssize_t count) {
    for (Py_ssize_t i = 1; i < count; i++) {
        if (sources[i].trajectory->reader->segment != sources[0].trajectory->reader->segment) {
            PyErr_SetString(PyExc_ValueError,
                            "plan_gather: expected trajectories of one Consumer, got several's");
            return false;
        }
    }
    return true;
}

/* plan_gather(trajectories, names, memory uint8 [n], shift, chunk_tokens, advantages float32 [S],
 * flags uint8 [S] or None, scores float64 [S], versions int64 [S], sizes int64 [G]) -> (bytes,
 * tokens, longest, found_at, borders_at, versions_at, sizes_at, scores_at, launches): the table,
 * with all addresses shifted; where the memory is less than bytes, nothing is written, and there
 * are no launches. */
static PyObject *plan_gather(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items, *names[FIELDS], *object, *arrays[5];
    long long shift;
    unsigned int chunk_tokens;
    if (!PyArg_ParseTuple(args, "O!(OOOO)OLIOOOOO", &PyList_Type, &items, &names[0], &names[1],
                          &names[2], &names[3], &object, &shift, &chunk_tokens, &arrays[0],
                          &arrays[1], &arrays[2], &arrays[3], &arrays[4])) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(items);
    uint64_t n = (uint64_t)count, room = array_elements(object);
    struct told told = {.groups = array_elements(arrays[4])};
    uint8_t *memory;
    if (!check_array(object, "memory", NPY_UINT8, room, true, &memory) ||
        !check_array(arrays[0], "advantages", NPY_FLOAT32, n, false, &told.advantages) ||
        (arrays[1] != Py_None &&
         !check_array(arrays[1], "flags", NPY_UINT8, n, false, &told.flags)) ||
        !check_array(arrays[2], "scores", NPY_FLOAT64, n, false, &told.scores) ||
        !check_array(arrays[3], "versions", NPY_INT64, n, false, &told.versions) ||
        !check_array(arrays[4], "sizes", NPY_INT64, told.groups, false, &told.sizes)) {
        return NULL;
    }
    if (count == 0 || chunk_tokens == 0 || (uintptr_t)memory % sizeof(int64_t) != 0) {
        PyErr_SetString(PyExc_ValueError,
                        "plan_gather: expected at least one trajectory, chunks of 1 token or more, "
                        "and memory on a word's border");
        return NULL;
    }
    struct source *sources = PyMem_Malloc((size_t)count * sizeof *sources);
    if (sources == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *launches = NULL;
    struct table table;
    if (find_sources(items, names, sources) && in_one_mapping(sources, count)) {
        table = lay_table(sources, n, told.groups, chunk_tokens);
        launches = batch_fits(table.tokens) ? PyList_New(0) : NULL;
    }
    if (launches != NULL && room >= table.bytes) {
        fill_facts(sources, n, &told, memory, &table);
        if (!fill_chunks(sources, n, chunk_tokens, shift, &told,
                         (const int32_t *)(memory + table.borders_at), (int64_t *)memory,
                         launches)) {
            Py_CLEAR(launches);
        }
    }
    PyMem_Free(sources);
    return launches == NULL
               ? NULL
               : Py_BuildValue("KKKKKKKKN", (unsigned long long)table.bytes,
                               (unsigned long long)table.tokens, (unsigned long long)table.longest,
                               (unsigned long long)table.found_at,
                               (unsigned long long)table.borders_at,
                               (unsigned long long)table.versions_at,
                               (unsigned long long)table.sizes_at,
                               (unsigned long long)table.scores_at, launches);
}

/* mapping_of(trajectory) -> (address, bytes) of the mapping that it lies in. */
static PyObject *mapping_of(PyObject *module, PyObject *item) {
    (void)module;
    if (!Py_IS_TYPE(item, &TrajectoryType)) {
        return PyErr_Format(PyExc_TypeError, "expected a trajectory, got %.100s",
                            Py_TYPE(item)->tp_name);
    }
    const SegmentObject *segment = ((TrajectoryObject *)item)->reader->segment;
    return Py_BuildValue("KK", (unsigned long long)(uintptr_t)segment->c.base,
                         (unsigned long long)segment->c.bytes);
}

/* find_not_finite(array float32 [n]) -> position of the first nan or infinity, or -1. */
static PyObject *find_not_finite(PyObject *module, PyObject *object) {
    (void)module;
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_TYPE(array) != NPY_FLOAT32 ||
        PyArray_NDIM(array) != 1 || !PyArray_IS_C_CONTIGUOUS(array)) {
        PyErr_SetString(PyExc_TypeError,
                        "find_not_finite: expected a contiguous float32 array of one dimension");
        return NULL;
    }
    npy_intp n = PyArray_SIZE(array);
    const float *values = PyArray_DATA(array);
    uint64_t at;
    Py_BEGIN_ALLOW_THREADS
    at = gather_find_not_finite(values, (uint64_t)n);
    Py_END_ALLOW_THREADS
    return PyLong_FromSsize_t(at < (uint64_t)n ? (npy_intp)at : -1);
}

/* mentioning(trajectories, word) -> positions of those whose encoded meta contains these bytes. */
static PyObject *mentioning(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items;
    const char *word;
    Py_ssize_t word_bytes;
    if (!PyArg_ParseTuple(args, "O!y#", &PyList_Type, &items, &word, &word_bytes)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                         Py_TYPE(item)->tp_name);
            Py_CLEAR(found);
            break;
        }
        const TrajectoryObject *t = (const TrajectoryObject *)item;
        if (t->meta_bytes < (uint32_t)word_bytes) {
            continue;
        }
        if (!trajectory_readable(t)) {
            Py_CLEAR(found);
            break;
        }
        if (memmem(trajectory_bytes(t) + t->meta_offset, t->meta_bytes, word,
                   (size_t)word_bytes) != NULL) {
            PyObject *position = PyLong_FromSsize_t(i);
            if (position == NULL || PyList_Append(found, position) < 0) {
                Py_CLEAR(found);
            }
            Py_XDECREF(position);
        }
    }
    return found;
}

static PyMethodDef functions[] = {
    {"plan_gather", plan_gather, METH_VARARGS, NULL},
    {"mapping_of", mapping_of, METH_O, NULL},
    {"find_not_finite", find_not_finite, METH_O, NULL},
    {"mentioning", mentioning, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* What a kind in the table is to numpy, by its number. */
static PyObject *kind_names(void) {
    return Py_BuildValue("(sssssssssss)", "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4",
                         "f8");
}
_Static_assert(ELEMENT_BOOL == 0 && ELEMENT_U64 == 8 && ELEMENT_F32 == 9 && ELEMENT_F64 == 10,
               "kind_names has them in this order");

bool locate_add_functions(PyObject *module) {
    PyObject *names = kind_names();
    bool added = names != NULL && PyModule_AddObjectRef(module, "ELEMENT_KINDS", names) == 0 &&
                 PyModule_AddIntMacro(module, CHUNK_WORDS) == 0;
    Py_XDECREF(names);
    return added && PyModule_AddFunctions(module, functions) == 0;
}
