/* The tables of a pool as dictionaries. Nothing here is a bound for anything. */
#include "python/pool/pool_rows.h"

#include "python/pool/pool_object.h"
#include "pool/lease.h"
#include "pool/rows.h"

static PyObject *text_of(const char *text, size_t room) {
    char copy[POOL_ERROR_BYTES];
    memcpy(copy, text, room);
    return PyUnicode_DecodeUTF8(copy, (Py_ssize_t)strnlen(copy, room), "replace");
}

#define LOAD(field) atomic_load_explicit(&(field), memory_order_relaxed)

static PyObject *describe_slot(const struct pool *pool, uint32_t slot, uint64_t latest) {
    struct slot_row row;
    bool whole = lease_peek(pool, slot, &row);
    uint32_t state = LOAD(row.state);
    const char *name = whole                   ? "ready"
                       : state == POOL_EMPTY   ? "empty"
                       : state == POOL_WRITING ? "writing"
                                               : "damaged";
    return Py_BuildValue(
        "{s:I,s:s,s:O,s:K,s:L,s:K,s:K,s:I,s:I,s:K,s:K,s:L,s:N}", "slot", slot, "state", name, "newest",
        latest == pool_word(row.sequence, slot) ? Py_True : Py_False, "sequence",
        (unsigned long long)row.sequence, "version", (long long)row.version, "bytes",
        (unsigned long long)row.bytes, "meta_bytes", (unsigned long long)row.meta_bytes, "digests",
        row.digests, "ranks", row.ranks, "published_unix_ns",
        (unsigned long long)row.published_unix_ns, "base_sequence",
        (unsigned long long)row.base_sequence, "base_version", (long long)row.base_version, "text", text_of(row.text, sizeof row.text));
}

static PyObject *describe_rank(const struct pool *pool, uint32_t rank) {
    const struct rank_row *row = &pool->rank_rows[rank];
    return Py_BuildValue("{s:I,s:i,s:I,s:N,s:K,s:K,s:K,s:N}", "rank", rank, "life",
                         (int)rows_writer_life(pool, rank), "pid", LOAD(row->pid), "label",
                         text_of(row->label, sizeof row->label), "started",
                         (unsigned long long)LOAD(row->started), "done",
                         (unsigned long long)LOAD(row->done), "failed",
                         (unsigned long long)LOAD(row->failed), "error",
                         text_of(row->error, sizeof row->error));
}

static PyObject *describe_reader(const struct pool *pool, uint32_t index) {
    const struct reader_row *row = &pool->reader_rows[index];
    /* SYNC: pool-applied. */
    unsigned long long applied = atomic_load_explicit(&row->applied, memory_order_acquire);
    unsigned long long refused = atomic_load_explicit(&row->refused, memory_order_acquire);
    return Py_BuildValue(
        "{s:I,s:i,s:I,s:N,s:N,s:I,s:K,s:L,s:K,s:L,s:i,s:N}", "reader", index, "life",
        (int)rows_reader_life(pool, index), "pid", LOAD(row->pid), "label",
        text_of(row->label, sizeof row->label), "device", text_of(row->device, sizeof row->device),
        "holds", LOAD(row->holds), "applied", applied, "applied_version",
        (long long)LOAD(row->applied_version), "refused", refused, "refused_version",
        (long long)LOAD(row->refused_version), "error_code", (int)LOAD(row->error_code), "error",
        text_of(row->error, sizeof row->error));
}

static bool append(PyObject *list, PyObject *item) {
    bool done = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return done;
}

static bool fill(const struct pool *pool, PyObject *slots, PyObject *ranks, PyObject *readers) {
    uint64_t latest = lease_newest(pool);
    for (uint32_t i = 0; i < pool->max_slots; i++) {
        if (!append(slots, describe_slot(pool, i, latest))) {
            return false;
        }
    }
    for (uint32_t i = 0; i < POOL_MAX_RANKS; i++) {
        if (rows_writer_life(pool, i) != ROW_FREE && !append(ranks, describe_rank(pool, i))) {
            return false;
        }
    }
    for (uint32_t i = 0; i < POOL_MAX_READERS; i++) {
        if (rows_reader_life(pool, i) != ROW_FREE && !append(readers, describe_reader(pool, i))) {
            return false;
        }
    }
    return true;
}

/* pool_rows(pool): the tables; rows of nobody are left out. */
static PyObject *py_pool_rows(PyObject *module, PyObject *args) {
    (void)module;
    PoolObject *self;
    if (!PyArg_ParseTuple(args, "O!", &PoolType, &self) || !py_companion_usable(&self->base)) {
        return NULL;
    }
    const struct pool_header *header = self->c.header;
    PyObject *slots = PyList_New(0), *ranks = PyList_New(0), *readers = PyList_New(0);
    PyObject *result = NULL;
    if (slots != NULL && ranks != NULL && readers != NULL &&
        fill(&self->c, slots, ranks, readers)) {
        result = Py_BuildValue(
            "{s:O,s:O,s:O,s:I,s:K,s:K,s:K}", "slots", slots, "ranks", ranks, "readers", readers,
            "slots_open", LOAD(header->slots_open), "published",
            (unsigned long long)LOAD(header->published), "skipped",
            (unsigned long long)LOAD(header->skipped), "writing",
            (unsigned long long)pool_word_sequence(LOAD(header->writing)));
    }
    Py_XDECREF(slots);
    Py_XDECREF(ranks);
    Py_XDECREF(readers);
    return result;
}

static PyMethodDef functions[] = {
    {"pool_rows", py_pool_rows, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_pool_rows_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
