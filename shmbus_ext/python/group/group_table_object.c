/* GroupTable: samples in cells by key, for shmbus.stash, until their group is complete.
 *
 * The table reads only `key`, `group_size`, `need`, `index` and `nbytes` of a sample and decides
 * nothing. The stash handles a taken cell, a different group size and, if `judged`, a full entry.
 *
 * Invariant: a non-NULL cell owns a reference, and the table empties the cell before returning it
 * to the pool. */
#include "python/group/group.h"

#include "base/clock.h"
#include "base/failpoints.h"
#include "ring/reader.h"

/* ---- Entries of complete groups, and their two lists: ready and leased.
 *
 * Invariants:
 * - An entry is in at most one list, and the list owns a reference: a lease outlives its holder's
 *   object until ended.
 * - Entries are leased in order of completion; an entry given back goes first. */
/* Facts of one sample; the strings are borrowed from the sample. */
struct arrival {
    PyObject *sample;
    PyObject *key; /* owned */
    struct group_key at;
    uint32_t width;
    uint32_t need;
    uint32_t cell;
    uint64_t nbytes;
    bool failed;
    bool leased; /* by an earlier collector, in a group with samples missing */
};

/* Make an entry object for a group of a table, with room for its samples. */
static GroupEntryObject *py_group_entry_new(const struct group_entry *entry, PyObject *key) {
    GroupEntryObject *made = (GroupEntryObject *)GroupEntryType.tp_alloc(&GroupEntryType, 0);
    if (made == NULL) {
        return NULL;
    }
    made->key = Py_NewRef(key);
    made->born_s = entry->born_s;
    made->size = entry->width;
    made->need = entry->need;
    made->missing = entry->missing;
    made->split = py_entry_split(entry);
    made->samples = PyList_New((Py_ssize_t)(entry->need - entry->missing));
    if (made->samples == NULL) {
        Py_CLEAR(made);
    }
    return made;
}

static uint64_t samples_of(const GroupEntryObject *entry) {
    return (uint64_t)PyList_GET_SIZE(entry->samples);
}

static GroupEntryObject *entry_at(struct list_link *link) {
    return LIST_ENTRY(link, GroupEntryObject, link);
}

/* Count the entry into its list and its split; sign -1 counts out. */
static void count_entry(GroupListsObject *self, const GroupEntryObject *entry, uint64_t sign) {
    const uint64_t samples = sign * samples_of(entry);
    const bool ready = entry->place == ENTRY_READY;
    struct entry_list *list = ready ? &self->ready[entry->split] : &self->leased;
    list->groups += sign;
    list->samples += samples;
    if (ready) {
        self->ready_groups += sign;
        self->ready_samples += samples;
    } else {
        self->leased_of[entry->split].groups += sign;
        self->leased_of[entry->split].samples += samples;
    }
}

/* Put an entry into the index of keys, or take it out, also under a pending exception. Without
 * memory the index goes: the next full() makes a new index. */
static void index_entry(GroupListsObject *self, GroupEntryObject *entry) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *newest = PyDict_GetItemWithError(self->by_key, entry->key);
    entry->same_key = (GroupEntryObject *)newest;
    if (PyErr_Occurred() || PyDict_SetItem(self->by_key, entry->key, (PyObject *)entry) < 0) {
        PyErr_Clear();
        Py_CLEAR(self->by_key);
    }
    PyErr_Restore(type, value, trace);
}

static void unindex_entry(GroupListsObject *self, GroupEntryObject *entry) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *newest = PyDict_GetItemWithError(self->by_key, entry->key);
    int failed = newest == NULL ? -1 : 0;
    if (newest == (PyObject *)entry) {
        failed = entry->same_key == NULL
                     ? PyDict_DelItem(self->by_key, entry->key)
                     : PyDict_SetItem(self->by_key, entry->key, (PyObject *)entry->same_key);
    } else if (newest != NULL) {
        GroupEntryObject *at = (GroupEntryObject *)newest;
        while (at->same_key != entry) {
            at = at->same_key;
        }
        at->same_key = entry->same_key;
    }
    if (failed < 0) {
        PyErr_Clear();
        Py_CLEAR(self->by_key);
    }
    PyErr_Restore(type, value, trace);
}

/* Insert before a neighbour, or at the end of the list; the caller provides the list's
 * reference. */
static void enter(GroupListsObject *self, enum entry_place place, struct list_link *at,
                  GroupEntryObject *entry) {
    list_insert_before(at, &entry->link);
    entry->lists = self;
    entry->place = place;
    count_entry(self, entry, 1);
    if (self->by_key != NULL) {
        index_entry(self, entry);
    }
}

/* Remove the entry from its list; the list's reference becomes the caller's. */
static void leave(GroupEntryObject *entry) {
    list_unlink(&entry->link);
    count_entry(entry->lists, entry, UINT64_MAX);
    if (entry->lists->by_key != NULL) {
        unindex_entry(entry->lists, entry);
    }
    entry->lists = NULL;
    entry->place = ENTRY_NOWHERE;
}

static void py_group_lists_init(GroupListsObject *self) {
    for (uint32_t split = 0; split < SHMBUS_MAX_SPLITS; split++) {
        list_init(&self->ready[split].entries);
    }
    list_init(&self->leased.entries);
}

static void clear(struct entry_list *list) {
    while (!list_is_empty(&list->entries)) {
        GroupEntryObject *entry = entry_at(list->entries.next);
        leave(entry);
        Py_DECREF(entry);
    }
}

static void py_group_lists_clear(GroupListsObject *self) {
    Py_CLEAR(self->by_key);
    for (uint32_t split = 0; split < SHMBUS_MAX_SPLITS; split++) {
        clear(&self->ready[split]);
    }
    clear(&self->leased);
}

/* Append an unlisted entry to the ready list. */
static void py_group_lists_push_ready(GroupListsObject *self, GroupEntryObject *entry) {
    Py_INCREF(entry);
    enter(self, ENTRY_READY, &self->ready[entry->split].entries, entry);
}

/* Mark the members of a group with samples missing as leased in the ring, for the next
 * collector. */
static void mark_members(const GroupEntryObject *entry) {
    uint32_t state = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entry->samples); i++) {
        PyObject *item = PyList_GET_ITEM(entry->samples, i);
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            return;
        }
        const TrajectoryObject *t = (const TrajectoryObject *)item;
        struct segment *segment = &t->holder->segment->c;
        if (state == 0) {
            state = shmbus_leased_state((uint32_t)samples_of(entry), t->producer_id, t->sequence);
            SET_RELAXED(segment->header->leased_in_part, 1);
        }
        SET_RELAXED(record_of(segment, &t->ref.place)->state, state);
        FAILPOINT("lease-marking");
    }
}

PyObject *py_group_lists_lease_ready(GroupListsObject *self, uint32_t split, Py_ssize_t limit,
                                     uint64_t now_ns) {
    struct entry_list *from = &self->ready[split];
    uint64_t ready = from->groups;
    Py_ssize_t count = limit < 0 ? 0 : (uint64_t)limit < ready ? limit : (Py_ssize_t)ready;
    PyObject *leased = PyList_New(count);
    for (Py_ssize_t i = 0; leased != NULL && i < count; i++) {
        GroupEntryObject *entry = entry_at(from->entries.next);
        leave(entry);
        entry->leased_ns = now_ns;
        entry->leases++;
        if (samples_of(entry) < entry->size) {
            mark_members(entry);
        }
        enter(self, ENTRY_LEASED, &self->leased.entries, entry);
        PyList_SET_ITEM(leased, i, Py_NewRef((PyObject *)entry));
    }
    return leased;
}

void py_group_entry_give_back(GroupEntryObject *entry) {
    GroupListsObject *lists = entry->lists;
    leave(entry);
    enter(lists, ENTRY_READY, lists->ready[entry->split].entries.next, entry);
}

void py_group_entry_end(GroupEntryObject *entry) {
    leave(entry);
    Py_DECREF(entry);
}

uint64_t py_group_lists_leased_since(const GroupListsObject *self) {
    /* The list keeps leases in order of time. */
    struct list_link *first = self->leased.entries.next;
    return first == &self->leased.entries ? 0 : entry_at(first)->leased_ns;
}

bool py_group_lists_have_leased(const GroupListsObject *self, const PyObject *object) {
    const GroupEntryObject *entry = (const GroupEntryObject *)object;
    return Py_IS_TYPE(object, &GroupEntryType) && entry->lists == self &&
           entry->place == ENTRY_LEASED;
}

/* push(entry): append an unlisted entry to the ready list. */
static PyObject *py_group_lists_push(GroupListsObject *self, PyObject *object) {
    NEVER(!Py_IS_TYPE(object, &GroupEntryType) ||
          ((GroupEntryObject *)object)->place != ENTRY_NOWHERE, NULL);
    py_group_lists_push_ready(self, (GroupEntryObject *)object);
    Py_RETURN_NONE;
}

/* lease(limit, split=0) -> list[GroupEntry]: the entries ready longest. */
static PyObject *py_group_lists_lease(GroupListsObject *self, PyObject *args) {
    Py_ssize_t limit;
    unsigned int split = SHMBUS_SPLIT_TRAIN;
    if (!PyArg_ParseTuple(args, "n|I", &limit, &split)) {
        return NULL;
    }
    NEVER(split >= SHMBUS_MAX_SPLITS, NULL);
    return py_group_lists_lease_ready(self, split, limit, clock_monotonic_ns());
}

/* give_back(entry): return a leased entry to the front of the ready list. */
static PyObject *py_group_lists_give_back(GroupListsObject *self, PyObject *object) {
    NEVER(!py_group_lists_have_leased(self, object), NULL);
    py_group_entry_give_back((GroupEntryObject *)object);
    Py_RETURN_NONE;
}

/* remove(entry): remove a ready or leased entry from its list. */
static PyObject *py_group_lists_remove(GroupListsObject *self, PyObject *object) {
    GroupEntryObject *entry = (GroupEntryObject *)object;
    NEVER(!Py_IS_TYPE(object, &GroupEntryType) || entry->lists != self, NULL);
    py_group_entry_end(entry);
    Py_RETURN_NONE;
}

/* is_leased(entry) -> bool: True while the entry is under lease here. */
static PyObject *py_group_lists_is_leased(GroupListsObject *self, PyObject *object) {
    return PyBool_FromLong(py_group_lists_have_leased(self, object));
}

/* Index the listed entries: the first full() makes the index, which groups without failures and
 * drops never need. */
static void index_all(GroupListsObject *self) {
    self->by_key = PyDict_New();
    for (uint32_t i = 0; i <= SHMBUS_MAX_SPLITS; i++) {
        struct list_link *head =
            i < SHMBUS_MAX_SPLITS ? &self->ready[i].entries : &self->leased.entries;
        for (struct list_link *l = head->next; self->by_key != NULL && l != head; l = l->next) {
            index_entry(self, entry_at(l));
        }
    }
}

/* full(key) -> list[GroupEntry]: ready and leased entries of the key. */
static PyObject *py_group_lists_full(GroupListsObject *self, PyObject *key) {
    if (self->by_key == NULL) {
        index_all(self);
    }
    if (self->by_key == NULL) {
        return PyErr_NoMemory();
    }
    GroupEntryObject *entry = (GroupEntryObject *)PyDict_GetItemWithError(self->by_key, key);
    PyObject *found = PyErr_Occurred() ? NULL : PyList_New(0);
    for (; found != NULL && entry != NULL; entry = entry->same_key) {
        py_list_add(&found, Py_NewRef((PyObject *)entry));
    }
    return found;
}

static void py_group_entry_dealloc(GroupEntryObject *self) {
    Py_XDECREF(self->key);
    Py_XDECREF(self->samples);
    PyObject_Free(self);
}

static PyMemberDef group_entry_members[] = {
    {"key", T_OBJECT_EX, offsetof(GroupEntryObject, key), READONLY, NULL},
    {"samples", T_OBJECT_EX, offsetof(GroupEntryObject, samples), READONLY, NULL},
    {"size", T_UINT, offsetof(GroupEntryObject, size), READONLY, NULL},
    {"need", T_UINT, offsetof(GroupEntryObject, need), READONLY, NULL},
    {"missing", T_UINT, offsetof(GroupEntryObject, missing), READONLY, NULL},
    {"split", T_UINT, offsetof(GroupEntryObject, split), READONLY, NULL},
    {"born_s", T_DOUBLE, offsetof(GroupEntryObject, born_s), READONLY, NULL},
    {"nbytes", T_LONGLONG, offsetof(GroupEntryObject, nbytes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject GroupEntryType = {
    TYPE_BASICS("GroupEntry", GroupEntryObject, py_group_entry_dealloc, 0),
    .tp_members = group_entry_members,
};

/* ---- A sample's key and place, from a Trajectory, or the attributes of a foreign object.
 *
 * Invariant: equal keys have equal hashes, whatever their source object. */
static bool hash_key(struct group_key *key, PyObject *id, long long round, uint32_t split) {
    Py_ssize_t length = PyUnicode_GET_LENGTH(id) * (Py_ssize_t)PyUnicode_KIND(id);
    Py_hash_t hash = PyObject_Hash(id);
    NEVER(length > UINT16_MAX, false);
    key->bytes = PyUnicode_DATA(id);
    key->length = (uint16_t)length;
    key->kind = (uint8_t)((uint32_t)PyUnicode_KIND(id) | split << KEY_KIND_BITS);
    key->tag = round;
    /* An odd multiplier spreads rounds over the 64 bits; the string's hash comes keyed and well
     * mixed. */
    key->hash = (uint64_t)hash ^ ((uint64_t)round * UINT64_C(0x9E3779B97F4A7C15)) ^
                ((uint64_t)split * UINT64_C(0xD1B54A32D192ED03));
    return true;
}

/* A key: a str, (str, int), or (str, int or None, split number). */
static bool py_key_read(struct group_key *at, PyObject *key) {
    PyObject *id = key, *number = Py_None;
    long long round = SHMBUS_NO_ROUND;
    unsigned long split = SHMBUS_SPLIT_TRAIN;
    Py_ssize_t parts = PyTuple_CheckExact(key) ? PyTuple_GET_SIZE(key) : 1;
    if (parts == 2 || parts == 3) {
        id = PyTuple_GET_ITEM(key, 0);
        number = PyTuple_GET_ITEM(key, 1);
    }
    if (number != Py_None || parts == 2) {
        round = PyLong_AsLongLong(number);
    }
    if (parts == 3) {
        split = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(key, 2));
    }
    if (PyErr_Occurred()) {
        return false;
    }
    if (!PyUnicode_Check(id) || split >= SHMBUS_MAX_SPLITS) {
        return py_refuse(
            PyExc_TypeError,
            "key: expected a str, (str, int) or (str, int or None, int below %u), got %R",
            SHMBUS_MAX_SPLITS, key);
    }
    return hash_key(at, id, round, (uint32_t)split);
}

static bool take_number(PyObject *sample, PyObject *name, uint64_t limit, uint64_t *number) {
    PyObject *value = PyObject_GetAttr(sample, name);
    if (value == NULL) {
        return false;
    }
    *number = PyLong_AsUnsignedLongLong(value);
    bool good = !(*number == UINT64_MAX && PyErr_Occurred());
    if (good && *number > limit) {
        PyErr_Format(PyExc_ValueError, "%U: expected at most %llu, got %R", name, U64(limit),
                     value);
        good = false;
    }
    Py_DECREF(value);
    return good;
}

static PyObject *py_key_of(PyObject *sample) {
    if (Py_IS_TYPE(sample, &TrajectoryType)) {
        return Py_NewRef(((TrajectoryObject *)sample)->key);
    }
    return PyObject_GetAttr(sample, py_word.key);
}

/* Read a sample's facts; false with an exception and no key to release. */
static bool py_arrival_read(struct arrival *to, PyObject *sample, bool count_bytes) {
    to->sample = sample;
    to->leased = false;
    to->key = py_key_of(sample);
    if (to->key == NULL) {
        return false;
    }
    if (Py_IS_TYPE(sample, &TrajectoryType)) {
        const TrajectoryObject *t = (const TrajectoryObject *)sample;
        to->width = (uint32_t)PyLong_AsUnsignedLong(t->group_size);
        to->need = to->width == 0 ? 0 : t->need;
        to->cell = (uint32_t)PyLong_AsUnsignedLong(t->index);
        to->nbytes = t->ref.bytes;
        to->failed = t->failed;
        to->leased = t->leased != 0;
        if (!hash_key(&to->at, t->instance_id, t->round, t->split)) {
            Py_CLEAR(to->key);
            return false;
        }
        return true;
    }
    uint64_t width, need, cell, failed;
    to->nbytes = 0;
    if (!py_key_read(&to->at, to->key) ||
        !take_number(sample, py_word.group_size, SHMBUS_MAX_GROUP_SIZE, &width) ||
        !take_number(sample, py_word.need, width, &need) ||
        !take_number(sample, py_word.index, SHMBUS_MAX_GROUP_SIZE, &cell) ||
        !take_number(sample, py_word.failed, 1, &failed) ||
        (count_bytes && !take_number(sample, py_word.nbytes, INT64_MAX, &to->nbytes))) {
        Py_CLEAR(to->key);
        return false;
    }
    to->width = (uint32_t)width;
    to->need = (uint32_t)need;
    to->cell = (uint32_t)cell;
    to->failed = failed != 0;
    return true;
}

/* Sum the ring bytes of a list of samples; false with an exception. */
static bool py_sum_bytes(PyObject *samples, uint64_t *total) {
    *total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(samples); i++) {
        PyObject *sample = PyList_GET_ITEM(samples, i);
        uint64_t nbytes;
        if (Py_IS_TYPE(sample, &TrajectoryType)) {
            nbytes = ((TrajectoryObject *)sample)->ref.bytes;
        } else if (!take_number(sample, py_word.nbytes, INT64_MAX, &nbytes)) {
            return false;
        }
        *total += nbytes;
    }
    return true;
}

/* ---- The table. */
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

/* Adjust the counts of filled cells and of open entries. */
static void count_cells(GroupTableObject *self, uint32_t split, int64_t cells, int64_t entries) {
    struct open_count *open = &self->open[split];
    self->cells += (uint64_t)cells;
    open->cells += (uint64_t)cells;
    open->groups += (uint64_t)entries;
}

/* Move an entry with its references into an object; by now its samples have left the caches. */
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

/* 1 if the sample's group fails, already or by this sample; -1 with an exception. */
static int is_failing(const GroupTableObject *self, const struct arrival *from) {
    if (from->failed) {
        return PyDict_SetDefault(self->failing, from->key, Py_None) == NULL ? -1 : 1;
    }
    return PyDict_GET_SIZE(self->failing) == 0 ? 0 : PyDict_Contains(self->failing, from->key);
}

/* Put one sample into its cell; return the outcome. */
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

/* Queue a full entry as ready or, if judged, hand it to the caller. */
static bool complete(GroupTableObject *self, struct group_entry *entry, const struct arrival *last,
                     PyObject *left) {
    GroupEntryObject *taken = take_entry(self, entry, last->at.hash, last->key);
    if (taken == NULL) {
        return false;
    }
    if ((last->at.tag != SHMBUS_NO_ROUND &&
         PyDict_SetItem(self->recent, taken->key, Py_None) < 0) ||
        (taken->need < taken->size && PyList_Append(self->cancelled, taken->key) < 0)) {
        Py_DECREF(taken);
        return false;
    }
    if (self->judged && taken->split == SHMBUS_SPLIT_TRAIN) {
        return py_append(left, (PyObject *)taken);
    }
    py_group_lists_push_ready(&self->lists, taken);
    Py_DECREF(taken);
    return true;
}

/* Prefetch for the whole batch first, then work. */
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
            !py_append(left, Py_BuildValue("(iO)", status, arrivals[i].sample))) {
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

/* put(samples, now_s) -> list: put every sample into its cell. The result lists, in order, samples
 * and groups neither in the table nor ready: (reason, sample) for a refused sample and, if
 * `judged`, a GroupEntry per newly filled group. Keys of full entries with a round go into the dict
 * `recent`, and a key in `recent` never begins a new entry. A failure's key goes into the dict
 * `failing`, and later samples of the key are refused: an entry found by `take` holds exactly the
 * samples before the failure. */
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

/* take(key) -> GroupEntry | None: remove the entry of the key, complete or not. */
static PyObject *py_group_table_take(GroupTableObject *self, PyObject *key) {
    struct group_key at;
    if (!py_key_read(&at, key)) {
        return NULL;
    }
    struct group_entry *entry = group_table_find(&self->c, &at);
    return entry == NULL ? Py_NewRef(Py_None) : (PyObject *)take_entry(self, entry, at.hash, key);
}

/* gather(samples, now_s) -> GroupEntry: of samples by index, never put into the table. */
static PyObject *py_group_table_gather(GroupTableObject *self, PyObject *args) {
    PyObject *samples;
    struct arrival first = {.key = NULL};
    struct group_entry entry = {0};
    if (!PyArg_ParseTuple(args, "O!d", &PyList_Type, &samples, &entry.born_s)) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(samples);
    NEVER(count == 0, NULL);
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

/* find(key) -> GroupEntry or None: a copy of the key's entry. */
static PyObject *py_group_table_find(GroupTableObject *self, PyObject *key) {
    struct group_key at;
    if (!py_key_read(&at, key)) {
        return NULL;
    }
    struct group_entry *entry = group_table_find(&self->c, &at);
    return entry == NULL ? Py_NewRef(Py_None) : (PyObject *)copy_entry(self, entry);
}

/* oldest(count) -> list[GroupEntry]: copies of the oldest entries, oldest first. */
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
        py_list_add(&found, (PyObject *)copy_entry(self, entry));
    }
    return found;
}

/* samples() -> list: samples in cells, by the age of their entries, and then of ready groups, in
 * order. */
static PyObject *py_group_table_samples(GroupTableObject *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *found = PyList_New((Py_ssize_t)(self->cells + self->lists.ready_samples));
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
    for (uint32_t split = 0; found != NULL && split < SHMBUS_MAX_SPLITS; split++) {
        struct list_link *head = &self->lists.ready[split].entries;
        for (struct list_link *l = head->next; l != head; l = l->next) {
            PyObject *samples = entry_at(l)->samples;
            for (Py_ssize_t i = 0; i < PyList_GET_SIZE(samples); i++) {
                PyList_SET_ITEM(found, to++, Py_NewRef(PyList_GET_ITEM(samples, i)));
            }
        }
    }
    return found;
}

/* counts(split) -> (open groups, their samples, and likewise for ready and for leased groups) */
static PyObject *py_group_table_counts(GroupTableObject *self, PyObject *argument) {
    unsigned long split = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) {
        return NULL;
    }
    NEVER(split >= SHMBUS_MAX_SPLITS, NULL);
    const struct open_count *open = &self->open[split];
    const struct entry_list *ready = &self->lists.ready[split];
    return Py_BuildValue("(KKKKKK)", U64(open->groups), U64(open->cells), U64(ready->groups),
                         U64(ready->samples), U64(self->lists.leased_of[split].groups),
                         U64(self->lists.leased_of[split].samples));
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
    NEVER(self->c.buckets != NULL, -1);
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

static PyMethodDef group_table_methods[] = {
    METHOD("put", py_group_table_put, METH_VARARGS, NULL),
    METHOD("take", py_group_table_take, METH_O, NULL),
    METHOD("gather", py_group_table_gather, METH_VARARGS, NULL),
    METHOD("remove", py_group_lists_remove, METH_O, NULL),
    METHOD("find", py_group_table_find, METH_O, NULL),
    METHOD("counts", py_group_table_counts, METH_O, NULL),
    METHOD("full", py_group_lists_full, METH_O, NULL),
    METHOD("oldest", py_group_table_oldest, METH_O, NULL),
    METHOD("samples", py_group_table_samples, METH_NOARGS, NULL),
    METHOD("push", py_group_lists_push, METH_O, NULL),
    METHOD("lease", py_group_lists_lease, METH_VARARGS, NULL),
    METHOD("give_back", py_group_lists_give_back, METH_O, NULL),
    METHOD("is_leased", py_group_lists_is_leased, METH_O, NULL),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_table_getset[] = {
    {"oldest_born_s", (getter)py_group_table_oldest_born, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef group_table_members[] = {
    {"cells", T_ULONGLONG, offsetof(GroupTableObject, cells), READONLY, NULL},
    {"accepted", T_ULONGLONG, offsetof(GroupTableObject, accepted), READONLY, NULL},
    {"nbytes", T_ULONGLONG, offsetof(GroupTableObject, nbytes), READONLY, NULL},
    {"ready_groups", T_ULONGLONG, offsetof(GroupTableObject, lists.ready_groups), READONLY, NULL},
    {"ready_cells", T_ULONGLONG, offsetof(GroupTableObject, lists.ready_samples), READONLY, NULL},
    {"leased_groups", T_ULONGLONG, offsetof(GroupTableObject, lists.leased.groups), READONLY, NULL},
    {"leased_cells", T_ULONGLONG, offsetof(GroupTableObject, lists.leased.samples), READONLY, NULL},
    {"recent", T_OBJECT_EX, offsetof(GroupTableObject, recent), READONLY, NULL},
    {"cancelled", T_OBJECT_EX, offsetof(GroupTableObject, cancelled), READONLY, NULL},
    {"failing", T_OBJECT_EX, offsetof(GroupTableObject, failing), READONLY, NULL},
    {"failing_cells", T_ULONGLONG, offsetof(GroupTableObject, failing_cells), 0, NULL},
    {"unheld_groups", T_ULONGLONG, offsetof(GroupTableObject, unheld_groups), 0, NULL},
    {"unheld_cells", T_ULONGLONG, offsetof(GroupTableObject, unheld_cells), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PySequenceMethods group_table_sequence = {.sq_length = (lenfunc)py_group_table_length};

PyTypeObject GroupTableType = {
    TYPE_BASICS("GroupTable", GroupTableObject, py_group_table_dealloc, 0),
    .tp_methods = group_table_methods,
    .tp_getset = group_table_getset,
    .tp_members = group_table_members,
    .tp_as_sequence = &group_table_sequence,
    .tp_init = (initproc)py_group_table_init,
    .tp_new = py_group_table_new,
};
