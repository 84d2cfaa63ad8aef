/* SlotPool: mapping, roles, bells, and this process's row.
 *
 * Invariants: a handle is a writer or a reader, never both, because a file lock taken for the
 * second role would replace the first role's lock. Leases and writes keep the mapping and its locks
 * until the last lease or write ends, even after close. */
#include "python/pool/pool.h"

#include <unistd.h>

static enum shared_status open_pool(CompanionObject *self, int fd, bool read_only) {
    return pool_open(&((PoolObject *)self)->c, fd, read_only);
}

static void shut(CompanionObject *base) {
    PoolObject *self = (PoolObject *)base;
    if (py_companion_is_own(base)) {
        rows_leave(&self->c);
    }
    pool_unmap(&self->c);
}

static void isolate(CompanionObject *self) {
    pool_isolate(&((PoolObject *)self)->c);
}

static struct bell *bell_of(CompanionObject *self, unsigned int number) {
    return number < POOL_BELLS ? pool_bell(&((PoolObject *)self)->c, (enum pool_bell)number) : NULL;
}

static const struct companion_kind pool_kind = {
    "pool", offsetof(PoolObject, c.file), open_pool, shut, isolate, bell_of,
};

static PyObject *py_pool_create(PyTypeObject *type, PyObject *args) {
    int fd;
    PyObject *name;
    struct pool_geometry plan;
    unsigned long long slot_bytes, meta_bytes, block_bytes, patch_bytes;
    if (!PyArg_ParseTuple(args, "iUIIKKKK", &fd, &name, &plan.slots, &plan.max_slots, &slot_bytes,
                          &meta_bytes, &block_bytes, &patch_bytes)) {
        return NULL;
    }
    plan.slot_bytes = slot_bytes;
    plan.meta_bytes = meta_bytes;
    plan.block_bytes = block_bytes;
    plan.patch_bytes = patch_bytes;
    if (!pool_plan(&plan)) {
        return PyErr_Format(
            PyExc_ValueError,
            "pool '%U': no pool can be laid out for slots=%u of max_slots=%u (1 to %u), "
            "slot_bytes=%llu, meta_bytes=%llu (to %llu), block_bytes=%llu (a power of two "
            "from %llu to %llu), patch_bytes=%llu",
            name, plan.slots, plan.max_slots, POOL_MAX_SLOTS, slot_bytes, meta_bytes,
            U64(POOL_MAX_META_BYTES), block_bytes, U64(POOL_MIN_BLOCK), U64(POOL_MAX_BLOCK),
            patch_bytes);
    }
    PoolObject *self = (PoolObject *)py_companion_alloc(type, &pool_kind, name);
    if (self == NULL) {
        return NULL;
    }
    enum shared_status status;
    Py_BEGIN_ALLOW_THREADS
    status = pool_create(&self->c, fd, &plan);
    Py_END_ALLOW_THREADS
    return py_companion_result(&self->base, status);
}

static PyObject *py_pool_open(PyTypeObject *type, PyObject *args) {
    return py_companion_open(type, &pool_kind, args);
}

static bool has_no_role(PoolObject *self) {
    NEVER(self->c.rank >= 0 || self->c.reader >= 0 || self->c.file.read_only, false);
    return true;
}

static PyObject *py_pool_claim_writer(PoolObject *self, PyObject *args) {
    unsigned int rank;
    const char *label;
    if (!PyArg_ParseTuple(args, "Is", &rank, &label) || !py_companion_usable(&self->base) ||
        !has_no_role(self)) {
        return NULL;
    }
    NEVER(rank >= POOL_MAX_RANKS, NULL);
    enum shared_status status = rows_claim_writer(&self->c, rank, label, (uint32_t)getpid());
    if (status == SHARED_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = pool_allow_writing(&self->c);
        Py_END_ALLOW_THREADS
        if (status != SHARED_OK) {
            rows_leave(&self->c);
        }
    }
    return py_companion_claimed(&self->base, status);
}

static PyObject *py_pool_claim_reader(PoolObject *self, PyObject *args) {
    const char *label, *device;
    int keeps_row = 0;
    if (!PyArg_ParseTuple(args, "ss|p", &label, &device, &keeps_row) ||
        !py_companion_usable(&self->base) || !has_no_role(self)) {
        return NULL;
    }
    return py_companion_claimed(
        &self->base, rows_claim_reader(&self->c, label, device, (uint32_t)getpid(), keeps_row));
}

/* True after adding a slot; False if every slot already has memory; raises without memory. */
static PyObject *py_pool_grow(PoolObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_companion_usable(&self->base)) {
        return NULL;
    }
    enum shared_status status;
    Py_BEGIN_ALLOW_THREADS
    status = pool_grow(&self->c);
    Py_END_ALLOW_THREADS
    if (status == SHARED_NO_SPACE || status == SHARED_SYSTEM_ERROR) {
        return py_companion_system_error(&self->base);
    }
    return PyBool_FromLong(status == SHARED_OK);
}

static PyObject *py_pool_newest(PoolObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_companion_usable(&self->base)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(pool_word_sequence(lease_newest(&self->c)));
}

static PyObject *py_pool_applied(PoolObject *self, PyObject *args) {
    unsigned long long sequence;
    long long version;
    if (!PyArg_ParseTuple(args, "KL", &sequence, &version) || !py_pool_is_reader(self)) {
        return NULL;
    }
    rows_applied(&self->c, sequence, version);
    Py_RETURN_NONE;
}

static PyObject *py_pool_refused(PoolObject *self, PyObject *args) {
    unsigned long long sequence;
    long long version;
    int code;
    const char *text;
    if (!PyArg_ParseTuple(args, "KLis", &sequence, &version, &code, &text) ||
        !py_pool_is_reader(self)) {
        return NULL;
    }
    rows_refused(&self->c, sequence, version, code, text);
    Py_RETURN_NONE;
}

static PyObject *py_pool_count_skipped(PoolObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_companion_usable(&self->base)) {
        return NULL;
    }
    publish_count_skipped(&self->c);
    Py_RETURN_NONE;
}

/* outcome(sequence): True for a whole version, False for an abandoned version, None while
 * pending. */
static PyObject *py_pool_outcome(PoolObject *self, PyObject *args) {
    unsigned long long sequence;
    if (!PyArg_ParseTuple(args, "K", &sequence) || !py_companion_usable(&self->base)) {
        return NULL;
    }
    enum shared_status status = publish_outcome(&self->c, sequence);
    if (status == SHARED_NOTHING) {
        Py_RETURN_NONE;
    }
    return PyBool_FromLong(status == SHARED_OK);
}

static PyObject *py_pool_piece_state(PoolObject *self, PyObject *args) {
    unsigned long long sequence;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "KI", &sequence, &rank) || !py_companion_usable(&self->base)) {
        return NULL;
    }
    NEVER(rank >= POOL_MAX_RANKS, NULL);
    return PyLong_FromLong(publish_piece_state(&self->c, sequence, rank));
}

static PyMethodDef pool_methods[] = {
    METHOD("create", py_pool_create, METH_VARARGS | METH_CLASS, NULL),
    METHOD("open", py_pool_open, METH_VARARGS | METH_CLASS, NULL),
    METHOD("close", py_companion_close, METH_NOARGS, NULL),
    METHOD("claim_writer", py_pool_claim_writer, METH_VARARGS, NULL),
    METHOD("claim_reader", py_pool_claim_reader, METH_VARARGS, NULL),
    METHOD("grow", py_pool_grow, METH_NOARGS, NULL),
    METHOD("newest", py_pool_newest, METH_NOARGS, NULL),
    METHOD("announce", py_companion_announce, METH_VARARGS, NULL),
    METHOD("wait", py_companion_wait, METH_VARARGS, NULL),
    METHOD("applied", py_pool_applied, METH_VARARGS, NULL),
    METHOD("refused", py_pool_refused, METH_VARARGS, NULL),
    METHOD("count_skipped", py_pool_count_skipped, METH_NOARGS, NULL),
    METHOD("outcome", py_pool_outcome, METH_VARARGS, NULL),
    METHOD("piece_state", py_pool_piece_state, METH_VARARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef pool_members[] = {
    {"name", T_OBJECT_EX, offsetof(PoolObject, base.name), READONLY, NULL},
    {"slot_bytes", T_ULONGLONG, offsetof(PoolObject, c.slot_bytes), READONLY, NULL},
    {"meta_bytes", T_ULONGLONG, offsetof(PoolObject, c.meta_bytes), READONLY, NULL},
    {"block_bytes", T_ULONGLONG, offsetof(PoolObject, c.block_bytes), READONLY, NULL},
    {"patch_bytes", T_ULONGLONG, offsetof(PoolObject, c.patch_bytes), READONLY, NULL},
    {"file_bytes", T_ULONGLONG, offsetof(PoolObject, c.file_bytes), READONLY, NULL},
    {"slot_stride", T_ULONGLONG, offsetof(PoolObject, c.slot_stride), READONLY, NULL},
    {"max_slots", T_UINT, offsetof(PoolObject, c.max_slots), READONLY, NULL},
    {"created_unix_ns", T_ULONGLONG, offsetof(PoolObject, c.created_unix_ns), READONLY, NULL},
    {"rank", T_INT, offsetof(PoolObject, c.rank), READONLY, NULL},
    {"reader", T_INT, offsetof(PoolObject, c.reader), READONLY, NULL},
    {"closed", T_BOOL, offsetof(PoolObject, base.handle_closed), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject PoolType = {
    TYPE_BASICS("SlotPool", PoolObject, py_companion_dealloc, 0),
    .tp_methods = pool_methods,
    .tp_members = pool_members,
};

/* ---- The tables of a pool as dictionaries, for display only: no value here bounds an access. */
static PyObject *describe_slot(const struct pool *pool, uint32_t slot, uint64_t latest) {
    struct slot_row row;
    bool whole = lease_peek(pool, slot, &row);
    uint32_t state = RELAXED(row.state);
    const char *name = whole                   ? "ready"
                       : state == POOL_EMPTY   ? "empty"
                       : state == POOL_WRITING ? "writing"
                                               : "damaged";
    return Py_BuildValue(
        "{s:I,s:s,s:O,s:K,s:L,s:K,s:K,s:I,s:I,s:K,s:K,s:L,s:N}", "slot", slot, "state", name,
        "newest", latest == pool_word(row.sequence, slot) ? Py_True : Py_False, "sequence",
        U64(row.sequence), "version", (long long)row.version, "bytes", U64(row.bytes), "meta_bytes",
        U64(row.meta_bytes), "digests", row.digests, "ranks", row.ranks, "published_unix_ns",
        U64(row.published_unix_ns), "base_sequence", U64(row.base_sequence), "base_version",
        (long long)row.base_version, "text", FIELD_TEXT(row.text));
}

static PyObject *describe_rank(const struct pool *pool, uint32_t rank) {
    const struct rank_row *row = &pool->rank_rows[rank];
    return Py_BuildValue("{s:I,s:i,s:I,s:N,s:K,s:K,s:K,s:N}", "rank", rank, "life",
                         (int)rows_writer_life(pool, rank), "pid", RELAXED(row->pid), "label",
                         FIELD_TEXT(row->label), "started",
                         U64(RELAXED(row->started)), "done", U64(RELAXED(row->done)), "failed",
                         U64(RELAXED(row->failed)), "error",
                         FIELD_TEXT(row->error));
}

static PyObject *describe_reader(const struct pool *pool, uint32_t index) {
    const struct reader_row *row = &pool->reader_rows[index];
    /* SYNC: pool-applied. */
    unsigned long long applied = ACQUIRE(row->applied);
    unsigned long long refused = ACQUIRE(row->refused);
    return Py_BuildValue(
        "{s:I,s:i,s:I,s:N,s:N,s:I,s:K,s:L,s:K,s:L,s:i,s:N}", "reader", index, "life",
        (int)rows_reader_life(pool, index), "pid", RELAXED(row->pid), "label",
        FIELD_TEXT(row->label), "device", FIELD_TEXT(row->device),
        "holds", RELAXED(row->holds), "applied", applied, "applied_version",
        (long long)RELAXED(row->applied_version), "refused", refused, "refused_version",
        (long long)RELAXED(row->refused_version), "error_code", (int)RELAXED(row->error_code),
        "error", FIELD_TEXT(row->error));
}

static bool fill(const struct pool *pool, const char *begins, PyObject *slots, PyObject *ranks,
                 PyObject *readers) {
    const size_t length = strlen(begins);
    uint64_t latest = lease_newest(pool);
    for (uint32_t i = 0; i < pool->max_slots; i++) {
        if (!py_append(slots, describe_slot(pool, i, latest))) {
            return false;
        }
    }
    for (uint32_t i = 0; i < POOL_MAX_RANKS; i++) {
        if (rows_writer_life(pool, i) != ROW_FREE && !py_append(ranks, describe_rank(pool, i))) {
            return false;
        }
    }
    for (uint32_t i = 0; i < POOL_MAX_READERS; i++) {
        if (length <= POOL_LABEL_BYTES &&
            strncmp(pool->reader_rows[i].label, begins, length) == 0 &&
            rows_reader_life(pool, i) != ROW_FREE &&
            !py_append(readers, describe_reader(pool, i))) {
            return false;
        }
    }
    return true;
}

/* pool_rows(pool, begins=""): the tables, without unowned rows; of the readers those whose label
 * begins so. */
static PyObject *py_pool_rows(PyObject *Py_UNUSED(module), PyObject *args) {
    PoolObject *self;
    const char *begins = "";
    if (!PyArg_ParseTuple(args, "O!|s", &PoolType, &self, &begins) ||
        !py_companion_usable(&self->base)) {
        return NULL;
    }
    const struct pool_header *header = self->c.header;
    PyObject *slots = PyList_New(0), *ranks = PyList_New(0), *readers = PyList_New(0);
    PyObject *result = NULL;
    if (slots != NULL && ranks != NULL && readers != NULL &&
        fill(&self->c, begins, slots, ranks, readers)) {
        result = Py_BuildValue("{s:O,s:O,s:O,s:I,s:K,s:K,s:K,s:K}", "slots", slots, "ranks", ranks,
                               "readers", readers, "slots_open", RELAXED(header->slots_open),
                               "published", U64(RELAXED(header->published)), "skipped",
                               U64(RELAXED(header->skipped)), "writing",
                               U64(pool_word_sequence(RELAXED(header->writing))), "life",
                               U64(header->life));
    }
    Py_XDECREF(slots);
    Py_XDECREF(ranks);
    Py_XDECREF(readers);
    return result;
}

static PyObject *runs_of(const struct reader_row *rows, long long version, uint64_t life) {
    PyObject *sequences = PyList_New(0);
    bool any = false;
    for (uint32_t i = 0; sequences != NULL && i < POOL_MAX_READERS; i++) {
        const struct reader_row *row = &rows[i];
        unsigned long long applied = RELAXED(row->applied);
        bool named = RELAXED(row->pid) != 0;
        any = any || (named && (applied != 0 || RELAXED(row->refused) != 0));
        if (named && applied != 0 && RELAXED(row->applied_version) == version &&
            !py_append(sequences, PyLong_FromUnsignedLongLong(applied))) {
            Py_CLEAR(sequences);
        }
    }
    return sequences == NULL ? NULL : Py_BuildValue("KNN", U64(life), sequences,
                                                    PyBool_FromLong(any));
}

/* pool_runs(fd, version): life, sequences of `version` named in reader rows, and True if a row
 * names a version; None for a pool of a different layout. Maps nothing. */
static PyObject *py_pool_runs(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    long long version;
    struct pool_header header;
    if (!PyArg_ParseTuple(args, "iL", &fd, &version)) {
        return NULL;
    }
    if (pread(fd, &header, sizeof header, 0) != (ssize_t)sizeof header ||
        RELAXED(header.magic) != POOL_MAGIC || header.layout_version != POOL_LAYOUT_VERSION) {
        Py_RETURN_NONE;
    }
    const size_t bytes = POOL_MAX_READERS * sizeof(struct reader_row);
    struct reader_row *rows = aligned_alloc(alignof(struct reader_row), bytes);
    if (rows == NULL) {
        return PyErr_NoMemory();
    }
    bool read = pread(fd, rows, bytes, (off_t)POOL_READERS_AT) == (ssize_t)bytes;
    PyObject *result = read ? runs_of(rows, version, header.life) : Py_NewRef(Py_None);
    free(rows);
    return result;
}

PyMethodDef py_pool_rows_functions[] = {
    {"pool_runs", py_pool_runs, METH_VARARGS, NULL},
    {"pool_rows", py_pool_rows, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
