/* GroupTable: samples in cells by key, for shmbus.stash, until their group is complete.
 * group_lists.c has what leaves the table.
 *
 * It knows a sample by `key`, `group_size`, `index` and `nbytes` only, and decides nothing: what a
 * taken cell or another width mean is the stash's, and a full entry's fate too where it is
 * `judged`.
 *
 * Invariant: each cell that is not NULL owns a reference; an entry's cells are emptied before the
 * entry goes back to its pool. */
#include "python/group/group_table_object.h"

#include "python/record/trajectory.h"

static struct {
    PyObject *key, *group_size, *index, *nbytes, *failed;
} attribute;

/* What one sample says of itself; the strings are borrowed from it. */
struct arrival {
    PyObject *sample;
    PyObject *key; /* owned */
    struct group_key at;
    uint32_t width;
    uint32_t cell;
    uint64_t nbytes;
    bool failed;
};

static bool hash_key(struct group_key *key, PyObject *id, long long epoch) {
    Py_ssize_t length = PyUnicode_GET_LENGTH(id) * (Py_ssize_t)PyUnicode_KIND(id);
    Py_hash_t hash = PyObject_Hash(id);
    if (length > UINT16_MAX) {
        PyErr_Format(PyExc_ValueError, "key: expected at most %d bytes, got %zd", UINT16_MAX,
                     length);
        return false;
    }
    key->bytes = PyUnicode_DATA(id);
    key->length = (uint16_t)length;
    key->kind = (uint8_t)PyUnicode_KIND(id);
    key->tag = epoch;
    /* An odd multiplier spreads epochs over all bits; the string's hash is keyed and well mixed. */
    key->hash = (uint64_t)hash ^ ((uint64_t)epoch * UINT64_C(0x9E3779B97F4A7C15));
    return true;
}

/* A key is a str, or (str, int). */
static bool split_key(struct group_key *at, PyObject *key) {
    PyObject *id = key;
    long long epoch = SHMBUS_NO_EPOCH;
    if (PyTuple_CheckExact(key) && PyTuple_GET_SIZE(key) == 2) {
        id = PyTuple_GET_ITEM(key, 0);
        epoch = PyLong_AsLongLong(PyTuple_GET_ITEM(key, 1));
        if (epoch == -1 && PyErr_Occurred()) {
            return false;
        }
    }
    if (!PyUnicode_Check(id)) {
        PyErr_Format(PyExc_TypeError, "key: expected a str or (str, int), got %R", key);
        return false;
    }
    return hash_key(at, id, epoch);
}

static bool take_number(PyObject *sample, PyObject *name, uint64_t limit, uint64_t *number) {
    PyObject *value = PyObject_GetAttr(sample, name);
    if (value == NULL) {
        return false;
    }
    *number = PyLong_AsUnsignedLongLong(value);
    bool good = !(*number == UINT64_MAX && PyErr_Occurred());
    if (good && *number > limit) {
        PyErr_Format(PyExc_ValueError, "%U: expected at most %llu, got %R", name,
                     (unsigned long long)limit, value);
        good = false;
    }
    Py_DECREF(value);
    return good;
}

static PyObject *key_of(PyObject *sample) {
    return Py_IS_TYPE(sample, &TrajectoryType) ? Py_NewRef(((TrajectoryObject *)sample)->key)
                                               : PyObject_GetAttr(sample, attribute.key);
}

static bool look_at(const GroupTableObject *self, PyObject *sample, struct arrival *to) {
    to->sample = sample;
    to->key = key_of(sample);
    if (to->key == NULL) {
        return false;
    }
    if (Py_IS_TYPE(sample, &TrajectoryType)) {
        const TrajectoryObject *t = (const TrajectoryObject *)sample;
        to->width = (uint32_t)PyLong_AsUnsignedLong(t->group_size);
        to->cell = (uint32_t)PyLong_AsUnsignedLong(t->index);
        to->nbytes = t->ref.bytes;
        to->failed = t->failed;
        if (!hash_key(&to->at, t->instance_id, t->epoch)) {
            Py_CLEAR(to->key);
            return false;
        }
        return true;
    }
    uint64_t width, cell, failed;
    to->nbytes = 0;
    if (!split_key(&to->at, to->key) ||
        !take_number(sample, attribute.group_size, SHMBUS_MAX_GROUP_SIZE, &width) ||
        !take_number(sample, attribute.index, SHMBUS_MAX_GROUP_SIZE, &cell) ||
        !take_number(sample, attribute.failed, 1, &failed) ||
        (self->count_bytes && !take_number(sample, attribute.nbytes, INT64_MAX, &to->nbytes))) {
        Py_CLEAR(to->key);
        return false;
    }
    to->width = (uint32_t)width;
    to->cell = (uint32_t)cell;
    to->failed = failed != 0;
    return true;
}


static bool sum_bytes(PyObject *samples, uint64_t *total) {
    *total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(samples); i++) {
        PyObject *sample = PyList_GET_ITEM(samples, i);
        uint64_t nbytes;
        if (Py_IS_TYPE(sample, &TrajectoryType)) {
            nbytes = ((TrajectoryObject *)sample)->ref.bytes;
        } else if (!take_number(sample, attribute.nbytes, INT64_MAX, &nbytes)) {
            return false;
        }
        *total += nbytes;
    }
    return true;
}

static PyObject *first_sample(struct group_entry *entry) {
    uint32_t i = 0;
    while (group_entry_cells(entry)[i] == NULL) {
        i++;
    }
    return group_entry_cells(entry)[i];
}

static GroupEntryObject *copy_entry(const GroupTableObject *self, struct group_entry *entry) {
    PyObject *key = key_of(first_sample(entry));
    GroupEntryObject *copy = key == NULL ? NULL : py_group_entry_new(entry, key);
    Py_XDECREF(key);
    Py_ssize_t at = 0;
    for (uint32_t i = 0; copy != NULL && i < entry->width; i++) {
        PyObject *sample = group_entry_cells(entry)[i];
        if (sample != NULL) {
            PyList_SET_ITEM(copy->samples, at++, Py_NewRef(sample));
        }
    }
    uint64_t nbytes = 0;
    if (copy != NULL && self->count_bytes && !sum_bytes(copy->samples, &nbytes)) {
        Py_CLEAR(copy);
    } else if (copy != NULL) {
        copy->nbytes = (long long)nbytes;
    }
    return copy;
}

/* Takes an entry out of the table, as an object that has its references from then on. The samples,
 * which no cache may hold any more, are not looked at unless their bytes count. */
static GroupEntryObject *take_entry(GroupTableObject *self, struct group_entry *entry,
                                    uint64_t hash, PyObject *key) {
    GroupEntryObject *taken = py_group_entry_new(entry, key);
    if (taken == NULL) {
        return NULL;
    }
    Py_ssize_t at = 0;
    for (uint32_t i = 0; i < entry->width; i++) {
        PyObject *sample = group_entry_cells(entry)[i];
        if (sample != NULL) {
            PyList_SET_ITEM(taken->samples, at++, sample);
        }
    }
    self->cells -= entry->width - entry->missing;
    group_table_remove(&self->c, entry, hash);
    uint64_t nbytes = 0;
    if (self->count_bytes && !sum_bytes(taken->samples, &nbytes)) {
        Py_DECREF(taken);
        return NULL;
    }
    taken->nbytes = (long long)nbytes;
    self->nbytes -= nbytes;
    return taken;
}

enum {
    REFUSED_MEMORY = -1,
    TAKEN = 0,
    COMPLETED,
    REFUSED_DUPLICATE,
    REFUSED_GROUP_SIZE,
    REFUSED_SURPLUS,
    REFUSED_FAILING
};

/* Whether the sample's group is failing, and so kept elsewhere; from a failure on, it is. -1 with
 * an exception. */
static int is_failing(const GroupTableObject *self, const struct arrival *from) {
    if (from->failed) {
        return PyDict_SetDefault(self->failing, from->key, Py_None) == NULL ? -1 : 1;
    }
    return PyDict_GET_SIZE(self->failing) == 0 ? 0 : PyDict_Contains(self->failing, from->key);
}

/* Puts one sample into its cell; returns what became of it. */
static int arrive(GroupTableObject *self, const struct arrival *from, double now_s,
                  struct group_entry **at) {
    int elsewhere = is_failing(self, from);
    if (elsewhere != 0) {
        return elsewhere < 0 ? REFUSED_MEMORY : REFUSED_FAILING;
    }
    struct group_entry *entry = group_table_find(&self->c, &from->at);
    if (entry == NULL) {
        if (from->at.tag != SHMBUS_NO_EPOCH) {
            int known = PyDict_Contains(self->recent, from->key);
            if (known != 0) {
                return known < 0 ? REFUSED_MEMORY : REFUSED_SURPLUS;
            }
        }
        entry = group_table_insert(&self->c, &from->at, from->width, now_s);
        if (entry == NULL) {
            PyErr_NoMemory();
            return REFUSED_MEMORY;
        }
    } else if (entry->width != from->width) {
        return REFUSED_GROUP_SIZE;
    }
    void **cell = &group_entry_cells(entry)[from->cell];
    if (*cell != NULL) {
        return REFUSED_DUPLICATE;
    }
    *cell = Py_NewRef(from->sample);
    entry->missing--;
    self->cells++;
    self->nbytes += self->count_bytes ? from->nbytes : 0;
    *at = entry;
    return entry->missing == 0 ? COMPLETED : TAKEN;
}

static bool append(PyObject *list, PyObject *item) {
    bool good = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return good;
}

/* A full entry is ready to be leased, or, where it is to be judged, left to the caller. */
static bool complete(GroupTableObject *self, struct group_entry *entry, const struct arrival *last,
                     PyObject *left) {
    GroupEntryObject *taken = take_entry(self, entry, last->at.hash, last->key);
    if (taken == NULL) {
        return false;
    }
    if (last->at.tag != SHMBUS_NO_EPOCH && PyDict_SetItem(self->recent, taken->key, Py_None) < 0) {
        Py_DECREF(taken);
        return false;
    }
    if (self->judged) {
        return append(left, (PyObject *)taken);
    }
    py_group_lists_push_ready(&self->lists, taken);
    Py_DECREF(taken);
    return true;
}

/* First the misses of all of them, then the work. */
static bool put_batch(GroupTableObject *self, struct arrival *arrivals, Py_ssize_t count,
                      double now_s, PyObject *left) {
    for (Py_ssize_t i = 0; i < count; i++) {
        group_table_expect_entry(&self->c, arrivals[i].at.hash, arrivals[i].cell);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        struct group_entry *entry = NULL;
        int status = arrive(self, &arrivals[i], now_s, &entry);
        if (status == REFUSED_MEMORY ||
            (status == COMPLETED && !complete(self, entry, &arrivals[i], left))) {
            return false;
        }
        if (status > COMPLETED &&
            !append(left, Py_BuildValue("(iO)", status, arrivals[i].sample))) {
            return false;
        }
    }
    return true;
}

bool py_group_table_put_samples(GroupTableObject *self, PyObject *const *samples, Py_ssize_t count,
                                double now_s, PyObject *left) {
    struct arrival arrivals[SAMPLES_BATCH];
    Py_ssize_t ready = 0;
    bool good = true;
    for (; good && ready < count; ready++) {
        struct arrival *arrival = &arrivals[ready];
        if (!look_at(self, samples[ready], arrival)) {
            good = false;
            break;
        }
        if (!arrival->failed && (arrival->width == 0 || arrival->cell >= arrival->width)) {
            PyErr_Format(PyExc_ValueError, "index: expected less than group_size %u, got %u",
                         arrival->width, arrival->cell);
            Py_CLEAR(arrival->key);
            good = false;
            break;
        }
        group_table_expect_bucket(&self->c, arrival->at.hash);
    }
    good = good && put_batch(self, arrivals, ready, now_s, left);
    for (Py_ssize_t i = 0; i < ready; i++) {
        Py_XDECREF(arrivals[i].key);
    }
    return good;
}

/* put(samples, now_s) -> list: each sample into its cell. What it returns is what is not in the
 * table, nor ready, in order: (why, sample) for one that was refused, and, where they are judged,
 * a GroupEntry that this filled. The keys of full entries that have an epoch go into the dict
 * `recent`, and an entry whose key is there is not begun again. A failure's key goes into the dict
 * `failing`, and all that has such a key is refused: so an entry that `take` finds holds the
 * samples before the failure, and none after it. */
static PyObject *py_group_table_put(GroupTableObject *self, PyObject *args) {
    PyObject *samples;
    double now_s;
    if (!PyArg_ParseTuple(args, "Od", &samples, &now_s)) {
        return NULL;
    }
    PyObject *items = PySequence_Fast(samples, "put: expected an iterable of samples");
    PyObject *left = items == NULL ? NULL : PyList_New(0);
    Py_ssize_t total = left == NULL ? 0 : PySequence_Fast_GET_SIZE(items);
    for (Py_ssize_t at = 0; left != NULL && at < total; at += SAMPLES_BATCH) {
        Py_ssize_t count = total - at < SAMPLES_BATCH ? total - at : SAMPLES_BATCH;
        if (!py_group_table_put_samples(self, PySequence_Fast_ITEMS(items) + at, count, now_s,
                                        left)) {
            Py_CLEAR(left);
        }
    }
    Py_XDECREF(items);
    return left;
}

/* take_oldest() -> GroupEntry: the entry that was born first leaves as it is. */
static PyObject *py_group_table_take_oldest(GroupTableObject *self, PyObject *ignored) {
    (void)ignored;
    struct group_entry *entry = group_table_oldest(&self->c);
    if (entry == NULL) {
        PyErr_SetString(PyExc_IndexError, "take_oldest: the table is empty");
        return NULL;
    }
    struct group_key at;
    PyObject *key = key_of(first_sample(entry));
    PyObject *taken = NULL;
    if (key != NULL && split_key(&at, key)) {
        taken = (PyObject *)take_entry(self, entry, at.hash, key);
    }
    Py_XDECREF(key);
    return taken;
}

/* take(key) -> GroupEntry | None: the entry of that key leaves as it is. */
static PyObject *py_group_table_take(GroupTableObject *self, PyObject *key) {
    struct group_key at;
    if (!split_key(&at, key)) {
        return NULL;
    }
    struct group_entry *entry = group_table_find(&self->c, &at);
    return entry == NULL ? Py_NewRef(Py_None) : (PyObject *)take_entry(self, entry, at.hash, key);
}

/* oldest(count) -> list[GroupEntry]: copies of the entries that were born first, oldest first. */
static PyObject *py_group_table_oldest(GroupTableObject *self, PyObject *argument) {
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    if (limit == -1 && PyErr_Occurred()) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    uint64_t at = 0;
    for (Py_ssize_t i = 0; found != NULL && i < limit; i++) {
        struct group_entry *entry = group_table_next(&self->c, &at);
        if (entry == NULL) {
            break;
        }
        if (!append(found, (PyObject *)copy_entry(self, entry))) {
            Py_CLEAR(found);
        }
    }
    return found;
}

/* samples() -> list: all that are in cells, by the age of their entries. */
static PyObject *py_group_table_samples(GroupTableObject *self, PyObject *ignored) {
    (void)ignored;
    PyObject *found = PyList_New((Py_ssize_t)self->cells);
    Py_ssize_t to = 0;
    uint64_t at = 0;
    struct group_entry *entry;
    while (found != NULL && (entry = group_table_next(&self->c, &at)) != NULL) {
        for (uint32_t i = 0; i < entry->width; i++) {
            PyObject *sample = group_entry_cells(entry)[i];
            if (sample != NULL) {
                PyList_SET_ITEM(found, to++, Py_NewRef(sample));
            }
        }
    }
    return found;
}

static PyObject *py_group_table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    GroupTableObject *self = (GroupTableObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        py_group_lists_init(&self->lists);
    }
    return (PyObject *)self;
}

static int py_group_table_init(GroupTableObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"count_bytes", "judged", NULL};
    int count_bytes = 0, judged = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$pp", names, &count_bytes, &judged)) {
        return -1;
    }
    if (self->c.buckets != NULL) {
        PyErr_SetString(PyExc_TypeError, "this table is initialised already");
        return -1;
    }
    self->count_bytes = count_bytes != 0;
    self->judged = judged != 0;
    self->recent = PyDict_New();
    self->failing = PyDict_New();
    if (self->recent == NULL || self->failing == NULL) {
        return -1;
    }
    if (!group_table_begin(&self->c)) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void py_group_table_dealloc(GroupTableObject *self) {
    uint64_t at = 0;
    struct group_entry *entry;
    while (self->c.buckets != NULL && (entry = group_table_next(&self->c, &at)) != NULL) {
        PyObject **cells = (PyObject **)group_entry_cells(entry);
        for (uint32_t i = 0; i < entry->width; i++) {
            Py_CLEAR(cells[i]);
        }
    }
    group_table_end(&self->c);
    py_group_lists_clear(&self->lists);
    Py_XDECREF(self->recent);
    Py_XDECREF(self->failing);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Py_ssize_t py_group_table_length(GroupTableObject *self) {
    return (Py_ssize_t)self->c.count;
}

static PyObject *py_group_table_oldest_born(GroupTableObject *self, void *ignored) {
    (void)ignored;
    const struct group_entry *entry = group_table_oldest(&self->c);
    if (entry == NULL) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(entry->born_s);
}

static PyObject *py_group_table_memory(GroupTableObject *self, void *ignored) {
    (void)ignored;
    return PyLong_FromSize_t(self->c.bytes);
}

static PyMethodDef group_table_methods[] = {
    {"put", (PyCFunction)(void (*)(void))py_group_table_put, METH_VARARGS, NULL},
    {"take_oldest", (PyCFunction)(void (*)(void))py_group_table_take_oldest, METH_NOARGS, NULL},
    {"take", (PyCFunction)(void (*)(void))py_group_table_take, METH_O, NULL},
    {"full", (PyCFunction)(void (*)(void))py_group_lists_full, METH_O, NULL},
    {"oldest", (PyCFunction)(void (*)(void))py_group_table_oldest, METH_O, NULL},
    {"samples", (PyCFunction)(void (*)(void))py_group_table_samples, METH_NOARGS, NULL},
    {"push", (PyCFunction)(void (*)(void))py_group_lists_push, METH_O, NULL},
    {"lease", (PyCFunction)(void (*)(void))py_group_lists_lease, METH_O, NULL},
    {"end_lease", (PyCFunction)(void (*)(void))py_group_lists_end_lease, METH_O, NULL},
    {"give_back", (PyCFunction)(void (*)(void))py_group_lists_give_back, METH_O, NULL},
    {"is_leased", (PyCFunction)(void (*)(void))py_group_lists_is_leased, METH_O, NULL},
    {"ready_samples", (PyCFunction)(void (*)(void))py_group_lists_ready_samples, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_table_getset[] = {
    {"oldest_born_s", (getter)py_group_table_oldest_born, NULL,
     "When the oldest group began, or None.",
     NULL},
    {"memory_bytes", (getter)py_group_table_memory, NULL, "Bytes of the table itself.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef group_table_members[] = {
    {"cells", T_ULONGLONG, offsetof(GroupTableObject, cells), READONLY, "Samples in all cells."},
    {"nbytes", T_ULONGLONG, offsetof(GroupTableObject, nbytes), READONLY,
     "Their bytes, under count_bytes."},
    {"ready_groups", T_ULONGLONG, offsetof(GroupTableObject, lists.ready.groups), READONLY,
     "Full, not leased."},
    {"ready_cells", T_ULONGLONG, offsetof(GroupTableObject, lists.ready.samples), READONLY,
     "Their samples."},
    {"leased_groups", T_ULONGLONG, offsetof(GroupTableObject, lists.leased.groups), READONLY,
     "Under lease."},
    {"leased_cells", T_ULONGLONG, offsetof(GroupTableObject, lists.leased.samples), READONLY,
     "Their samples."},
    {"recent", T_OBJECT_EX, offsetof(GroupTableObject, recent), READONLY,
     "Keys with an epoch whose groups were complete, oldest first; the stash bounds it."},
    {"failing", T_OBJECT_EX, offsetof(GroupTableObject, failing), READONLY,
     "Keys of failing groups, which the stash keeps itself."},
    {"failing_cells", T_ULONGLONG, offsetof(GroupTableObject, failing_cells), 0,
     "Samples that the stash keeps itself, for messages."},
    {"unheld_groups", T_ULONGLONG, offsetof(GroupTableObject, unheld_groups), 0,
     "Leased groups that no client holds, for messages."},
    {"unheld_cells", T_ULONGLONG, offsetof(GroupTableObject, unheld_cells), 0, "Their samples."},
    {NULL, 0, 0, 0, NULL},
};

static PySequenceMethods group_table_sequence = {.sq_length = (lenfunc)py_group_table_length};

PyTypeObject GroupTableType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.GroupTable",
    .tp_basicsize = sizeof(GroupTableObject),
    .tp_dealloc = (destructor)py_group_table_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = group_table_methods,
    .tp_getset = group_table_getset,
    .tp_members = group_table_members,
    .tp_as_sequence = &group_table_sequence,
    .tp_init = (initproc)py_group_table_init,
    .tp_new = py_group_table_new,
};

bool py_group_table_add_constants(PyObject *module) {
    const struct word_note words[] = {
        {&attribute.key, "key"},
        {&attribute.group_size, "group_size"},
        {&attribute.index, "index"},
        {&attribute.nbytes, "nbytes"},
        {&attribute.failed, "failed"},
    };
    return INTERN_WORDS(words) &&
           PyModule_AddIntConstant(module, "REFUSED_DUPLICATE", REFUSED_DUPLICATE) == 0 &&
           PyModule_AddIntConstant(module, "REFUSED_GROUP_SIZE", REFUSED_GROUP_SIZE) == 0 &&
           PyModule_AddIntConstant(module, "REFUSED_SURPLUS", REFUSED_SURPLUS) == 0 &&
           PyModule_AddIntConstant(module, "REFUSED_FAILING", REFUSED_FAILING) == 0;
}
