/* Entries of complete groups, and the two lists that they are in: ready, and leased. */
#ifndef SHMBUS_PYTHON_GROUP_LISTS_H
#define SHMBUS_PYTHON_GROUP_LISTS_H

#include "python/list.h"
#include "ring/layout.h"
#include "stash/group_table.h"

enum entry_place { ENTRY_NOWHERE = 0, ENTRY_READY, ENTRY_LEASED };

/* A key's split stands beside the kind of its text (PyUnicode_KIND: 1, 2 or 4). */
#define KEY_KIND_BITS 4
_Static_assert((SHMBUS_MAX_SPLITS - 1) << KEY_KIND_BITS <= UINT8_MAX, "a byte has room for both");

static inline uint32_t py_entry_split(const struct group_entry *entry) {
    return (uint32_t)entry->key_kind >> KEY_KIND_BITS;
}

/* A group that left its table, or a copy of one that is in it. */
typedef struct {
    PyObject_HEAD
    PyObject *key;
    PyObject *samples;         /* list, by index */
    struct group_lists *lists; /* those that it is in, or NULL */
    struct list_link link;
    enum entry_place place;
    double born_s;
    long long nbytes;
    uint64_t leased_ns; /* when it was leased last; CLOCK_MONOTONIC */
    uint64_t leases;    /* how often it was leased */
    unsigned int size;
    unsigned int need;    /* samples that complete it */
    unsigned int missing; /* of those */
    unsigned int split;   /* its number */
} GroupEntryObject;
extern PyTypeObject GroupEntryType;

/* Owns a reference to each of its entries. */
struct entry_list {
    struct list_link entries;
    uint64_t groups;
    uint64_t samples;
};

/* What the object of a group table begins with: group_lists.c has those of its methods that are
 * about lists. */
typedef struct group_lists {
    PyObject_HEAD
    struct entry_list leased;
    struct entry_list ready[SHMBUS_MAX_SPLITS];
    uint64_t ready_groups, ready_samples; /* of all splits */
    struct {
        uint64_t groups, samples;
    } leased_of[SHMBUS_MAX_SPLITS];
} GroupListsObject;

void py_group_lists_init(GroupListsObject *self);
void py_group_lists_clear(GroupListsObject *self);

/* A group of a table as an object, without its samples yet. */
GroupEntryObject *py_group_entry_new(const struct group_entry *entry, PyObject *key);
/* One that is in no list becomes the last that is ready. */
void py_group_lists_push_ready(GroupListsObject *self, GroupEntryObject *entry);
/* What has been ready longest of a split is under lease since `now_ns`: a list of at most `limit`
 * entries. NULL with an exception, and then nothing is leased. */
PyObject *py_group_lists_lease_ready(GroupListsObject *self, uint32_t split, Py_ssize_t limit,
                                     uint64_t now_ns);
/* A leased entry is the next to be leased. */
void py_group_entry_give_back(GroupEntryObject *entry);
/* A leased entry is in no list any more. */
void py_group_entry_end(GroupEntryObject *entry);
/* Whether it is an entry that these lists have under lease. */
bool py_group_lists_have_leased(const GroupListsObject *self, const PyObject *object);
/* When the oldest lease was given, or 0; CLOCK_MONOTONIC. */
uint64_t py_group_lists_leased_since(const GroupListsObject *self);

/* Methods of GroupTable. */
PyObject *py_group_lists_push(GroupListsObject *self, PyObject *entry);
PyObject *py_group_lists_lease(GroupListsObject *self, PyObject *args);
PyObject *py_group_lists_count_ready(GroupListsObject *self, PyObject *split);
PyObject *py_group_lists_end_lease(GroupListsObject *self, PyObject *entry);
PyObject *py_group_lists_give_back(GroupListsObject *self, PyObject *entry);
PyObject *py_group_lists_withdraw(GroupListsObject *self, PyObject *entry);
PyObject *py_group_lists_is_leased(GroupListsObject *self, PyObject *entry);
PyObject *py_group_lists_ready_samples(GroupListsObject *self, PyObject *ignored);
PyObject *py_group_lists_full(GroupListsObject *self, PyObject *key);

#endif
