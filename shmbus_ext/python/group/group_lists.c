/* Entries of complete groups, and the two lists that they are in.
 *
 * Invariants:
 * - An entry is in at most one list, which owns a reference to it; so a lease outlives its holder's
 *   object, and a lease that was not ended stays one.
 * - Entries are leased in the order in which they became ready; one given back is the next. */
#include "python/group/group.h"

#include "base/clock.h"
#include "base/failpoints.h"
#include "python/record/record.h"
#include "ring/lane.h"

GroupEntryObject *py_group_entry_new(const struct group_entry *entry, PyObject *key) {
    GroupEntryObject *made = PyObject_New(GroupEntryObject, &GroupEntryType);
    if (made == NULL) {
        return NULL;
    }
    made->key = Py_NewRef(key);
    made->lists = NULL;
    made->link = (struct list_link){NULL, NULL};
    made->place = ENTRY_NOWHERE;
    made->born_s = entry->born_s;
    made->size = entry->width;
    made->need = entry->need;
    made->missing = entry->missing;
    made->split = py_entry_split(entry);
    made->nbytes = 0;
    made->leased_ns = 0;
    made->leases = 0;
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

static struct entry_list *list_of(GroupListsObject *self, enum entry_place place,
                                  const GroupEntryObject *entry) {
    return place == ENTRY_READY ? &self->ready[entry->split] : &self->leased;
}

/* Before a neighbour, or as the last where that is the list's head. The list's reference is the
 * caller's. */
static void enter(GroupListsObject *self, enum entry_place place, struct list_link *at,
                  GroupEntryObject *entry) {
    struct entry_list *list = list_of(self, place, entry);
    list_insert_before(at, &entry->link);
    entry->lists = self;
    entry->place = place;
    list->groups++;
    list->samples += samples_of(entry);
    if (place == ENTRY_READY) {
        self->ready_groups++;
        self->ready_samples += samples_of(entry);
    } else {
        self->leased_of[entry->split].groups++;
        self->leased_of[entry->split].samples += samples_of(entry);
    }
}

/* Out of its list; the list's reference becomes the caller's. */
static void leave(GroupEntryObject *entry) {
    GroupListsObject *self = entry->lists;
    struct entry_list *list = list_of(self, entry->place, entry);
    list_unlink(&entry->link);
    list->groups--;
    list->samples -= samples_of(entry);
    if (entry->place == ENTRY_READY) {
        self->ready_groups--;
        self->ready_samples -= samples_of(entry);
    } else {
        self->leased_of[entry->split].groups--;
        self->leased_of[entry->split].samples -= samples_of(entry);
    }
    entry->lists = NULL;
    entry->place = ENTRY_NOWHERE;
}

void py_group_lists_init(GroupListsObject *self) {
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

void py_group_lists_clear(GroupListsObject *self) {
    for (uint32_t split = 0; split < SHMBUS_MAX_SPLITS; split++) {
        clear(&self->ready[split]);
    }
    clear(&self->leased);
}

void py_group_lists_push_ready(GroupListsObject *self, GroupEntryObject *entry) {
    Py_INCREF(entry);
    enter(self, ENTRY_READY, &self->ready[entry->split].entries, entry);
}

/* Of a group that lacks samples, which may come yet: each member says in the ring that it is one, so
 * that whoever collects next has the same group. */
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
            atomic_store_explicit(&segment->header->leased_in_part, 1, memory_order_relaxed);
        }
        atomic_store_explicit(&record_of(segment, &t->ref.place)->state, state,
                              memory_order_relaxed);
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
    /* Leases are in the order in which they were given. */
    struct list_link *first = self->leased.entries.next;
    return first == &self->leased.entries ? 0 : entry_at(first)->leased_ns;
}

bool py_group_lists_have_leased(const GroupListsObject *self, const PyObject *object) {
    const GroupEntryObject *entry = (const GroupEntryObject *)object;
    return Py_IS_TYPE(object, &GroupEntryType) && entry->lists == self &&
           entry->place == ENTRY_LEASED;
}

static GroupEntryObject *require_leased(const GroupListsObject *self, PyObject *object) {
    if (!py_group_lists_have_leased(self, object)) {
        PyErr_Format(PyExc_ValueError, "expected an entry under lease here, got %R", object);
        return NULL;
    }
    return (GroupEntryObject *)object;
}

/* push(entry): one that is in no list becomes the last that is ready. */
PyObject *py_group_lists_push(GroupListsObject *self, PyObject *object) {
    if (!Py_IS_TYPE(object, &GroupEntryType) ||
        ((GroupEntryObject *)object)->place != ENTRY_NOWHERE) {
        PyErr_Format(PyExc_ValueError, "push: expected an entry that is in no list, got %R",
                     object);
        return NULL;
    }
    py_group_lists_push_ready(self, (GroupEntryObject *)object);
    Py_RETURN_NONE;
}

static bool is_split(unsigned int split) {
    if (split >= SHMBUS_MAX_SPLITS) {
        PyErr_Format(PyExc_ValueError, "split: expected less than %u, got %u", SHMBUS_MAX_SPLITS,
                     split);
        return false;
    }
    return true;
}

/* lease(limit, split=0) -> list[GroupEntry]: what has been ready longest. */
PyObject *py_group_lists_lease(GroupListsObject *self, PyObject *args) {
    Py_ssize_t limit;
    unsigned int split = SHMBUS_SPLIT_TRAIN;
    if (!PyArg_ParseTuple(args, "n|I", &limit, &split) || !is_split(split)) {
        return NULL;
    }
    return py_group_lists_lease_ready(self, split, limit, clock_monotonic_ns());
}

/* count_ready(split) -> int: groups of that split that are ready. */
PyObject *py_group_lists_count_ready(GroupListsObject *self, PyObject *argument) {
    unsigned long split = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !is_split(split > UINT_MAX ? UINT_MAX : (unsigned int)split)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(self->ready[split].groups);
}

/* end_lease(entry): it is in no list any more. */
PyObject *py_group_lists_end_lease(GroupListsObject *self, PyObject *object) {
    GroupEntryObject *entry = require_leased(self, object);
    if (entry == NULL) {
        return NULL;
    }
    py_group_entry_end(entry);
    Py_RETURN_NONE;
}

/* give_back(entry): a leased one is the next to be leased. */
PyObject *py_group_lists_give_back(GroupListsObject *self, PyObject *object) {
    GroupEntryObject *entry = require_leased(self, object);
    if (entry == NULL) {
        return NULL;
    }
    py_group_entry_give_back(entry);
    Py_RETURN_NONE;
}

/* withdraw(entry): a ready one is in no list any more. */
PyObject *py_group_lists_withdraw(GroupListsObject *self, PyObject *object) {
    GroupEntryObject *entry = (GroupEntryObject *)object;
    if (!Py_IS_TYPE(object, &GroupEntryType) || entry->lists != self ||
        entry->place != ENTRY_READY) {
        PyErr_Format(PyExc_ValueError, "expected an entry that is ready here, got %R", object);
        return NULL;
    }
    py_group_entry_end(entry);
    Py_RETURN_NONE;
}

/* is_leased(entry) -> bool: whether this leased it, and the lease has not ended. */
PyObject *py_group_lists_is_leased(GroupListsObject *self, PyObject *object) {
    return PyBool_FromLong(py_group_lists_have_leased(self, object));
}

/* ready_samples() -> list: those of ready groups, in their order. */
PyObject *py_group_lists_ready_samples(GroupListsObject *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *found = PyList_New((Py_ssize_t)self->ready_samples);
    if (found == NULL) {
        return NULL;
    }
    Py_ssize_t to = 0;
    for (uint32_t split = 0; split < SHMBUS_MAX_SPLITS; split++) {
        struct list_link *head = &self->ready[split].entries;
        for (struct list_link *l = head->next; l != head; l = l->next) {
            PyObject *samples = entry_at(l)->samples;
            for (Py_ssize_t i = 0; i < PyList_GET_SIZE(samples); i++) {
                PyList_SET_ITEM(found, to++, Py_NewRef(PyList_GET_ITEM(samples, i)));
            }
        }
    }
    return found;
}

/* full(key) -> list[GroupEntry]: those of that key that are ready or leased. */
PyObject *py_group_lists_full(GroupListsObject *self, PyObject *key) {
    PyObject *found = PyList_New(0);
    for (uint32_t i = 0; i <= SHMBUS_MAX_SPLITS; i++) {
        struct list_link *head =
            i < SHMBUS_MAX_SPLITS ? &self->ready[i].entries : &self->leased.entries;
        for (struct list_link *l = head->next; found != NULL && l != head; l = l->next) {
            GroupEntryObject *entry = entry_at(l);
            int equal = PyObject_RichCompareBool(entry->key, key, Py_EQ);
            if (equal < 0 || (equal > 0 && PyList_Append(found, (PyObject *)entry) < 0)) {
                Py_CLEAR(found);
            }
        }
    }
    return found;
}

static void py_group_entry_dealloc(GroupEntryObject *self) {
    Py_XDECREF(self->key);
    Py_XDECREF(self->samples);
    PyObject_Free(self);
}

static PyMemberDef group_entry_members[] = {
    {"key", T_OBJECT_EX, offsetof(GroupEntryObject, key), READONLY, "Its samples' key."},
    {"samples", T_OBJECT_EX, offsetof(GroupEntryObject, samples), READONLY,
     "The samples that are there, by index. Not to be changed."},
    {"size", T_UINT, offsetof(GroupEntryObject, size), READONLY, "Samples of a full one."},
    {"need", T_UINT, offsetof(GroupEntryObject, need), READONLY, "Samples that complete it."},
    {"missing", T_UINT, offsetof(GroupEntryObject, missing), READONLY,
     "How many of those are not there."},
    {"split", T_UINT, offsetof(GroupEntryObject, split), READONLY, "The number of its split."},
    {"born_s", T_DOUBLE, offsetof(GroupEntryObject, born_s), READONLY,
     "When its first sample arrived."},
    {"nbytes", T_LONGLONG, offsetof(GroupEntryObject, nbytes), READONLY, "Under count_bytes."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject GroupEntryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.GroupEntry",
    .tp_basicsize = sizeof(GroupEntryObject),
    .tp_dealloc = (destructor)py_group_entry_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_members = group_entry_members,
};

/* ---- A sample's key and place, from a Trajectory, a head, or the attributes of another object.
 *
 * Invariant: equal keys have equal hashes, whatever object they were read from. */
static struct {
    PyObject *key, *group_size, *need, *index, *nbytes, *failed;
} attribute;

static bool hash_key(struct group_key *key, PyObject *id, long long round, uint32_t split) {
    Py_ssize_t length = PyUnicode_GET_LENGTH(id) * (Py_ssize_t)PyUnicode_KIND(id);
    Py_hash_t hash = PyObject_Hash(id);
    if (length > UINT16_MAX) {
        PyErr_Format(PyExc_ValueError, "key: expected at most %d bytes, got %zd", UINT16_MAX,
                     length);
        return false;
    }
    key->bytes = PyUnicode_DATA(id);
    key->length = (uint16_t)length;
    key->kind = (uint8_t)((uint32_t)PyUnicode_KIND(id) | split << KEY_KIND_BITS);
    key->tag = round;
    /* An odd multiplier spreads rounds over all bits; the string's hash is keyed and well mixed. */
    key->hash = (uint64_t)hash ^ ((uint64_t)round * UINT64_C(0x9E3779B97F4A7C15)) ^
                ((uint64_t)split * UINT64_C(0xD1B54A32D192ED03));
    return true;
}

bool py_key_read(struct group_key *at, PyObject *key) {
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
        PyErr_Format(PyExc_TypeError,
                     "key: expected a str, (str, int) or (str, int or None, int below %u), got %R",
                     SHMBUS_MAX_SPLITS, key);
        return false;
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
        PyErr_Format(PyExc_ValueError, "%U: expected at most %llu, got %R", name,
                     (unsigned long long)limit, value);
        good = false;
    }
    Py_DECREF(value);
    return good;
}

PyObject *py_key_of(PyObject *sample) {
    if (Py_IS_TYPE(sample, &TrajectoryType)) {
        return Py_NewRef(((TrajectoryObject *)sample)->key);
    }
    return Py_IS_TYPE(sample, &OriginHeadType) ? Py_NewRef(((OriginHeadObject *)sample)->key)
                                               : PyObject_GetAttr(sample, attribute.key);
}

bool py_arrival_read(struct arrival *to, PyObject *sample, bool count_bytes) {
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
    if (Py_IS_TYPE(sample, &OriginHeadType)) {
        const OriginHeadObject *head = (const OriginHeadObject *)sample;
        to->width = head->group_size;
        to->need = head->need;
        to->cell = head->index;
        to->nbytes = head->nbytes;
        to->failed = head->reason != Py_None;
        if (!hash_key(&to->at, head->instance_id, head->round, SHMBUS_SPLIT_TRAIN)) {
            Py_CLEAR(to->key);
            return false;
        }
        return true;
    }
    uint64_t width, need, cell, failed;
    to->nbytes = 0;
    if (!py_key_read(&to->at, to->key) ||
        !take_number(sample, attribute.group_size, SHMBUS_MAX_GROUP_SIZE, &width) ||
        !take_number(sample, attribute.need, width, &need) ||
        !take_number(sample, attribute.index, SHMBUS_MAX_GROUP_SIZE, &cell) ||
        !take_number(sample, attribute.failed, 1, &failed) ||
        (count_bytes && !take_number(sample, attribute.nbytes, INT64_MAX, &to->nbytes))) {
        Py_CLEAR(to->key);
        return false;
    }
    to->width = (uint32_t)width;
    to->need = (uint32_t)need;
    to->cell = (uint32_t)cell;
    to->failed = failed != 0;
    return true;
}

bool py_sum_bytes(PyObject *samples, uint64_t *total) {
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

bool py_arrival_init(void) {
    const struct word_note words[] = {
        {&attribute.key, "key"},
        {&attribute.group_size, "group_size"},
        {&attribute.need, "need"},
        {&attribute.index, "index"},
        {&attribute.nbytes, "nbytes"},
        {&attribute.failed, "failed"},
    };
    return INTERN_WORDS(words);
}
