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
 *   rows     int64 [S, ROW_WORDS], a line a sequence
 *   chunks   int32 [C, 2]: a sequence, and a token of it; one for every chunk_tokens tokens or less
 *   borders  int32 [S + 1]: where each sequence begins in the batch
 *
 * Chunks of sequences that have the same fields, of the same dtypes, lie behind each other. */
enum {
    ROW_ADDRESSES = 0, /* of each field; 0 where there is none */
    ROW_TOKENS = FIELDS,
    ROW_START, /* in the batch */
    ROW_FLAGS, /* 0 here, and the caller's */
    ROW_GAIN,  /* likewise */
    ROW_WORDS,
};
_Static_assert(ROW_WORDS * sizeof(int64_t) == SHMBUS_RECORD_ALIGN, "a row is a cache line");

struct table {
    uint64_t tokens, longest, chunks;
    uint64_t chunks_at, borders_at, bytes;
};

static struct table lay_table(const struct source *sources, uint64_t count,
                              uint64_t chunk_tokens) {
    struct table table = {0};
    for (uint64_t i = 0; i < count; i++) {
        uint64_t tokens = sources[i].length;
        table.tokens += tokens;
        table.longest = tokens > table.longest ? tokens : table.longest;
        table.chunks += tokens / chunk_tokens + (tokens % chunk_tokens != 0);
    }
    table.chunks_at = count * ROW_WORDS * sizeof(int64_t);
    table.borders_at = shmbus_align_up(table.chunks_at + table.chunks * 2 * sizeof(int32_t),
                                       SHMBUS_RECORD_ALIGN);
    table.bytes = shmbus_align_up(table.borders_at + (count + 1) * sizeof(int32_t),
                                  SHMBUS_RECORD_ALIGN);
    return table;
}

static void fill_rows(const struct source *sources, uint64_t count, int64_t shift,
                      uint8_t *memory, const struct table *table) {
    int64_t *row = (int64_t *)memory;
    int32_t *borders = (int32_t *)(memory + table->borders_at);
    int64_t start = 0;
    for (uint64_t i = 0; i < count; i++, row += ROW_WORDS) {
        for (int f = 0; f < FIELDS; f++) {
            const uint8_t *at = sources[i].data[f];
            row[ROW_ADDRESSES + f] = at == NULL ? 0 : (int64_t)(uintptr_t)at + shift;
        }
        row[ROW_TOKENS] = (int64_t)sources[i].length;
        row[ROW_START] = start;
        row[ROW_FLAGS] = row[ROW_GAIN] = 0;
        borders[i] = (int32_t)start;
        start += row[ROW_TOKENS];
    }
    borders[count] = (int32_t)start;
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
                        int32_t *chunk, PyObject *launches) {
    uint64_t done = 0, chunks = 0;
    for (uint64_t first = 0; done < count; first++) {
        uint32_t word = signature(&sources[first]);
        bool met = false;
        for (uint64_t i = 0; i < first && !met; i++) {
            met = signature(&sources[i]) == word;
        }
        if (met) {
            continue;
        }
        uint64_t before = chunks;
        for (uint64_t i = first; i < count; i++) {
            if (signature(&sources[i]) != word) {
                continue;
            }
            done++;
            for (uint64_t at = 0; at < sources[i].length; at += chunk_tokens, chunks++) {
                *chunk++ = (int32_t)i;
                *chunk++ = (int32_t)at;
            }
        }
        if (chunks > before && !add_launch(launches, before, chunks - before, word)) {
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

/* plan_gather(trajectories, names, memory uint8 [n], shift, chunk_tokens) -> (bytes, tokens,
 * longest, chunks_at, borders_at, launches): the table, with all addresses shifted; where the
 * memory is less than bytes, nothing is written, and there are no launches. */
static PyObject *plan_gather(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *items, *names[FIELDS], *object;
    long long shift;
    unsigned int chunk_tokens;
    if (!PyArg_ParseTuple(args, "O!(OOOO)O!LI", &PyList_Type, &items, &names[0], &names[1],
                          &names[2], &names[3], &PyArray_Type, &object, &shift, &chunk_tokens)) {
        return NULL;
    }
    PyArrayObject *memory = (PyArrayObject *)object;
    Py_ssize_t count = PyList_GET_SIZE(items);
    if (count == 0 || chunk_tokens == 0 || PyArray_TYPE(memory) != NPY_UINT8 ||
        !PyArray_IS_C_CONTIGUOUS(memory) || !PyArray_ISWRITEABLE(memory) ||
        (uintptr_t)PyArray_DATA(memory) % sizeof(int64_t) != 0) {
        PyErr_SetString(PyExc_ValueError,
                        "plan_gather: expected at least one trajectory, chunks of 1 token or more, "
                        "and writable, contiguous memory of dtype uint8 on a word's border");
        return NULL;
    }
    struct source *sources = PyMem_Malloc((size_t)count * sizeof *sources);
    if (sources == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *launches = NULL;
    struct table table;
    if (find_sources(items, names, sources) && in_one_mapping(sources, count)) {
        table = lay_table(sources, (uint64_t)count, chunk_tokens);
        launches = batch_fits(table.tokens) ? PyList_New(0) : NULL;
    }
    if (launches != NULL && (uint64_t)PyArray_SIZE(memory) >= table.bytes) {
        uint8_t *base = PyArray_DATA(memory);
        fill_rows(sources, (uint64_t)count, shift, base, &table);
        if (!fill_chunks(sources, (uint64_t)count, chunk_tokens,
                         (int32_t *)(base + table.chunks_at), launches)) {
            Py_CLEAR(launches);
        }
    }
    PyMem_Free(sources);
    return launches == NULL
               ? NULL
               : Py_BuildValue("KKKKKN", (unsigned long long)table.bytes,
                               (unsigned long long)table.tokens, (unsigned long long)table.longest,
                               (unsigned long long)table.chunks_at,
                               (unsigned long long)table.borders_at, launches);
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
                 PyModule_AddIntMacro(module, ROW_WORDS) == 0;
    Py_XDECREF(names);
    return added && PyModule_AddFunctions(module, functions) == 0;
}
