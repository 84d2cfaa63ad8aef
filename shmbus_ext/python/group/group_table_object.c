/* GroupTable: samples in cells by key, for shmbus.stash, until their group is complete.
 * group_lists.c has what leaves the table.
 *
 * It knows a sample by `key`, `group_size`, `need`, `index` and `nbytes` only, and decides nothing: what a
 * taken cell or another width mean is the stash's, and a full entry's fate too where it is
 * `judged`.
 *
 * Invariant: each cell that is not NULL owns a reference; an entry's cells are emptied before the
 * entry goes back to its pool. */
#include "python/group/group.h"


static PyObject *first_sample(struct group_entry *entry) {
    uint32_t i = 0;
    while (group_entry_cells(entry)[i] == NULL) {
        i++;
    }
    return group_entry_cells(entry)[i];
}

static GroupEntryObject *copy_entry(const GroupTableObject *self, struct group_entry *entry) {
    PyObject *key = py_key_of(first_sample(entry));
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
    if (copy != NULL && self->count_bytes && !py_sum_bytes(copy->samples, &nbytes)) {
        Py_CLEAR(copy);
    } else if (copy != NULL) {
        copy->nbytes = (long long)nbytes;
    }
    return copy;
}

/* Samples that came into cells, or left them, and entries. */
static void count_cells(GroupTableObject *self, uint32_t split, int64_t cells, int64_t entries) {
    struct open_count *open = &self->open[split];
    self->cells += (uint64_t)cells;
    open->cells += (uint64_t)cells;
    open->groups += (uint64_t)entries;
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
    count_cells(self, py_entry_split(entry), -(int64_t)(entry->need - entry->missing), -1);
    group_table_remove(&self->c, entry, hash);
    uint64_t nbytes = 0;
    if (self->count_bytes && !py_sum_bytes(taken->samples, &nbytes)) {
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
    REFUSED_FAILING,
    REFUSED_LEASED
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
    if (from->leased) {
        return REFUSED_LEASED;
    }
    int elsewhere = is_failing(self, from);
    if (elsewhere != 0) {
        return elsewhere < 0 ? REFUSED_MEMORY : REFUSED_FAILING;
    }
    struct group_entry *entry = group_table_find(&self->c, &from->at);
    if (entry == NULL) {
        if (from->at.tag != SHMBUS_NO_ROUND) {
            int known = PyDict_Contains(self->recent, from->key);
            if (known != 0) {
                return known < 0 ? REFUSED_MEMORY : REFUSED_SURPLUS;
            }
        }
        entry = group_table_insert(&self->c, &from->at, from->width, from->need, now_s);
        if (entry == NULL) {
            PyErr_NoMemory();
            return REFUSED_MEMORY;
        }
        count_cells(self, py_entry_split(entry), 0, 1);
        self->splits_met |= 1u << py_entry_split(entry);
    } else if (entry->width != from->width || entry->need != from->need) {
        return REFUSED_GROUP_SIZE;
    }
    void **cell = &group_entry_cells(entry)[from->cell];
    if (*cell != NULL) {
        return REFUSED_DUPLICATE;
    }
    *cell = Py_NewRef(from->sample);
    entry->missing--;
    self->accepted++;
    count_cells(self, py_entry_split(entry), 1, 0);
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
    if (last->at.tag != SHMBUS_NO_ROUND && PyDict_SetItem(self->recent, taken->key, Py_None) < 0) {
        Py_DECREF(taken);
        return false;
    }
    if (taken->need < taken->size && PyList_Append(self->cancelled, taken->key) < 0) {
        Py_DECREF(taken);
        return false;
    }
    if (self->judged && taken->split == SHMBUS_SPLIT_TRAIN) {
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
        if (!py_arrival_read(arrival, samples[ready], self->count_bytes)) {
            good = false;
            break;
        }
        if (!arrival->failed && (arrival->need == 0 || arrival->cell >= arrival->width)) {
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
 * a GroupEntry that this filled. The keys of full entries that have a round go into the dict
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
static PyObject *py_group_table_take_oldest(GroupTableObject *self, PyObject *Py_UNUSED(ignored)) {
    struct group_entry *entry = group_table_oldest(&self->c);
    if (entry == NULL) {
        PyErr_SetString(PyExc_IndexError, "take_oldest: the table is empty");
        return NULL;
    }
    struct group_key at;
    PyObject *key = py_key_of(first_sample(entry));
    PyObject *taken = NULL;
    if (key != NULL && py_key_read(&at, key)) {
        taken = (PyObject *)take_entry(self, entry, at.hash, key);
    }
    Py_XDECREF(key);
    return taken;
}

/* take(key) -> GroupEntry | None: the entry of that key leaves as it is. */
static PyObject *py_group_table_take(GroupTableObject *self, PyObject *key) {
    struct group_key at;
    if (!py_key_read(&at, key)) {
        return NULL;
    }
    struct group_entry *entry = group_table_find(&self->c, &at);
    return entry == NULL ? Py_NewRef(Py_None) : (PyObject *)take_entry(self, entry, at.hash, key);
}

/* gather(samples, now_s) -> GroupEntry: a group of these samples, by index, that was never in the
 * table; it is in no list. */
static PyObject *py_group_table_gather(GroupTableObject *self, PyObject *args) {
    PyObject *samples;
    struct arrival first = {.key = NULL};
    struct group_entry entry = {0};
    if (!PyArg_ParseTuple(args, "O!d", &PyList_Type, &samples, &entry.born_s)) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(samples);
    if (count == 0) {
        PyErr_SetString(PyExc_ValueError, "gather: expected samples, got none");
        return NULL;
    }
    uint64_t nbytes = 0;
    if (!py_arrival_read(&first, PyList_GET_ITEM(samples, 0), false) ||
        (self->count_bytes && !py_sum_bytes(samples, &nbytes))) {
        Py_XDECREF(first.key);
        return NULL;
    }
    entry.width = (uint16_t)first.width;
    entry.need = (uint16_t)Py_MAX(first.need, (uint32_t)count);
    entry.missing = entry.need - (uint32_t)count;
    entry.key_kind = first.at.kind;
    GroupEntryObject *made = py_group_entry_new(&entry, first.key);
    Py_DECREF(first.key);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyList_SET_ITEM(made->samples, i, Py_NewRef(PyList_GET_ITEM(samples, i)));
    }
    if (made != NULL) {
        made->nbytes = (long long)nbytes;
    }
    return (PyObject *)made;
}

/* find(key) -> GroupEntry or None: a copy of the entry of a key. */
static PyObject *py_group_table_find(GroupTableObject *self, PyObject *key) {
    struct group_key at;
    if (!py_key_read(&at, key)) {
        return NULL;
    }
    struct group_entry *entry = group_table_find(&self->c, &at);
    return entry == NULL ? Py_NewRef(Py_None) : (PyObject *)copy_entry(self, entry);
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
static PyObject *py_group_table_samples(GroupTableObject *self, PyObject *Py_UNUSED(ignored)) {
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

/* counts(split) -> (open groups, their samples, ready groups, their samples, leased groups, their
 * samples) */
static PyObject *py_group_table_counts(GroupTableObject *self, PyObject *argument) {
    unsigned long split = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (split >= SHMBUS_MAX_SPLITS) {
        PyErr_Format(PyExc_ValueError, "split: expected less than %u, got %lu", SHMBUS_MAX_SPLITS,
                     split);
        return NULL;
    }
    const struct open_count *open = &self->open[split];
    const struct entry_list *ready = &self->lists.ready[split];
    return Py_BuildValue("(KKKKKK)", (unsigned long long)open->groups,
                         (unsigned long long)open->cells, (unsigned long long)ready->groups,
                         (unsigned long long)ready->samples,
                         (unsigned long long)self->lists.leased_of[split].groups,
                         (unsigned long long)self->lists.leased_of[split].samples);
}

static PyObject *py_group_table_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                                    PyObject *Py_UNUSED(kwargs)) {
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
    self->cancelled = PyList_New(0);
    if (self->recent == NULL || self->failing == NULL || self->cancelled == NULL) {
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
    Py_XDECREF(self->cancelled);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Py_ssize_t py_group_table_length(GroupTableObject *self) {
    return (Py_ssize_t)self->c.count;
}

static PyObject *py_group_table_oldest_born(GroupTableObject *self, void *Py_UNUSED(ignored)) {
    const struct group_entry *entry = group_table_oldest(&self->c);
    if (entry == NULL) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(entry->born_s);
}

static PyObject *py_group_table_memory(GroupTableObject *self, void *Py_UNUSED(ignored)) {
    return PyLong_FromSize_t(self->c.bytes);
}

static PyMethodDef group_table_methods[] = {
    {"put", (PyCFunction)(void (*)(void))py_group_table_put, METH_VARARGS, NULL},
    {"take_oldest", (PyCFunction)(void (*)(void))py_group_table_take_oldest, METH_NOARGS, NULL},
    {"take", (PyCFunction)(void (*)(void))py_group_table_take, METH_O, NULL},
    {"gather", (PyCFunction)(void (*)(void))py_group_table_gather, METH_VARARGS, NULL},
    {"withdraw", (PyCFunction)(void (*)(void))py_group_lists_withdraw, METH_O, NULL},
    {"find", (PyCFunction)(void (*)(void))py_group_table_find, METH_O, NULL},
    {"counts", (PyCFunction)(void (*)(void))py_group_table_counts, METH_O, NULL},
    {"full", (PyCFunction)(void (*)(void))py_group_lists_full, METH_O, NULL},
    {"oldest", (PyCFunction)(void (*)(void))py_group_table_oldest, METH_O, NULL},
    {"samples", (PyCFunction)(void (*)(void))py_group_table_samples, METH_NOARGS, NULL},
    {"push", (PyCFunction)(void (*)(void))py_group_lists_push, METH_O, NULL},
    {"lease", (PyCFunction)(void (*)(void))py_group_lists_lease, METH_VARARGS, NULL},
    {"count_ready", (PyCFunction)(void (*)(void))py_group_lists_count_ready, METH_O, NULL},
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
    {"accepted", T_ULONGLONG, offsetof(GroupTableObject, accepted), READONLY,
     "Samples that were ever put into a cell."},
    {"nbytes", T_ULONGLONG, offsetof(GroupTableObject, nbytes), READONLY,
     "Their bytes, under count_bytes."},
    {"ready_groups", T_ULONGLONG, offsetof(GroupTableObject, lists.ready_groups), READONLY,
     "Full, not leased."},
    {"ready_cells", T_ULONGLONG, offsetof(GroupTableObject, lists.ready_samples), READONLY,
     "Their samples."},
    {"leased_groups", T_ULONGLONG, offsetof(GroupTableObject, lists.leased.groups), READONLY,
     "Under lease."},
    {"leased_cells", T_ULONGLONG, offsetof(GroupTableObject, lists.leased.samples), READONLY,
     "Their samples."},
    {"recent", T_OBJECT_EX, offsetof(GroupTableObject, recent), READONLY,
     "Keys with a round whose groups were complete, oldest first; the stash bounds it."},
    {"cancelled", T_OBJECT_EX, offsetof(GroupTableObject, cancelled), READONLY,
     "Keys of groups that ended without all of their samples, until the reader has told producers."},
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
    return py_arrival_init() &&
           PyModule_AddIntConstant(module, "REFUSED_DUPLICATE", REFUSED_DUPLICATE) == 0 &&
           PyModule_AddIntConstant(module, "REFUSED_GROUP_SIZE", REFUSED_GROUP_SIZE) == 0 &&
           PyModule_AddIntConstant(module, "REFUSED_SURPLUS", REFUSED_SURPLUS) == 0 &&
           PyModule_AddIntConstant(module, "REFUSED_FAILING", REFUSED_FAILING) == 0 &&
           PyModule_AddIntConstant(module, "REFUSED_LEASED", REFUSED_LEASED) == 0;
}
