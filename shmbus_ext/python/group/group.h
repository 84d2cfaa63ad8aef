/* Groups for Python: how they come together, what a consumer gets, how a client ends them. */
#ifndef SHMBUS_PYTHON_GROUP_GROUP_H
#define SHMBUS_PYTHON_GROUP_GROUP_H

#include "python/binding.h"
#include "python/list.h"
#include "python/record/record.h"
#include "ring/layout.h"
#include "stash/group_table.h"

/* ---- Entries of complete groups, and the two lists that they are in: ready, and leased. */
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

/* What the object of a group table begins with. */
typedef struct group_lists {
    PyObject_HEAD
    struct entry_list leased;
    struct entry_list ready[SHMBUS_MAX_SPLITS];
    uint64_t ready_groups, ready_samples; /* of all splits */
    struct {
        uint64_t groups, samples;
    } leased_of[SHMBUS_MAX_SPLITS];
} GroupListsObject;

/* Leases at most `limit` of a split, the first ready first; NULL with an exception, none. */
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

bool py_arrival_init(void);

/* ---- ClientLease: one group that a daemon leased to this process; how its places travel. */
/* In place of a reason: the lease has not ended. */
#define LEASE_HELD (-1)

/* How a place travels from the daemon to a client: native numbers, one host. */
struct wire_place {
    uint32_t extent;
    uint32_t generation;
    uint64_t offset;
    uint64_t bytes;
};

typedef struct {
    PyObject_VAR_HEAD
    HolderObject *borrower;
    PyObject *key;     /* NULL, as the samples, until they have been read */
    PyObject *samples; /* list, by index */
    long long number;  /* the daemon's; another one's after it has been claimed */
    long long step;    /* of the ranks; -1 without */
    unsigned int size; /* samples of a complete group */
    int reason;        /* how it was ended here; LEASE_HELD until then */
    bool lost;         /* the next daemon knows nothing of it */
    bool locked;       /* its records count in their extents' lease locks */
    struct record_ref refs[];
} ClientLeaseObject;
extern PyTypeObject ClientLeaseType;

static inline Py_ssize_t py_client_lease_records(const ClientLeaseObject *self) {
    return Py_SIZE(self);
}

/* Of a grant's places; NULL with an exception, or without one where this segment has none. */
ClientLeaseObject *py_client_lease_new(HolderObject *borrower, PyObject *granted, long long step);

/* ---- What the segment says of deliveries, counted where groups are leased. */
/* Counts leased entries that were never leased before; anything else in the list is passed over. */
void py_delivery_count(SegmentObject *segment, PyObject *entries);

/* ---- GroupBase: what shmbus.Group is made of. */
extern PyTypeObject GroupBaseType;

/* A group of a type that is made of GroupBase. */
PyObject *py_group_new(PyTypeObject *type, PyObject *consumer, PyObject *lease);
/* Its lease, borrowed, if this consumer has it; NULL, without an exception, of others. */
PyObject *py_group_lease(PyObject *group, PyObject *consumer);
void py_group_set_state(PyObject *group, PyObject *state);
/* The samples of a group, borrowed; NULL with an exception for what is none. */
PyObject *py_group_samples(PyObject *group);
/* A new list of all groups' trajectories, and how many each has: int64 [G]. Or NULL. */
PyObject *py_group_members(PyObject *groups, PyObject **sizes);

/* ---- GroupTable: samples in cells by key, until their group is complete. */
/* Samples read together, so that the cache misses of one overlap with those of the others; few
 * enough for the pages of samples, entries and groups to stay in the first level of the TLB. */
#define SAMPLES_BATCH 16

/* Of one split: what is in the table. */
struct open_count {
    uint64_t groups, cells;
};

typedef struct {
    GroupListsObject lists; /* of the groups that are complete */
    struct group_table c;
    uint64_t cells;  /* that are filled */
    uint64_t accepted; /* samples that were ever put into a cell */
    uint64_t nbytes; /* of the samples in them, where they are counted */
    struct open_count open[SHMBUS_MAX_SPLITS];
    uint32_t splits_met; /* a bit each, of those that samples came of */
    bool count_bytes;
    bool judged;      /* complete groups are left to the caller */
    PyObject *recent; /* dict */
    /* Failing groups, by key, and how many samples those have; the stash keeps them. */
    PyObject *failing;
    uint64_t failing_cells;
    /* Leased groups that no client holds, and their samples; the daemon's, for messages. */
    uint64_t unheld_groups, unheld_cells;
    PyObject *cancelled; /* list of the keys of groups that ended without all of their samples */
} GroupTableObject;
extern PyTypeObject GroupTableType;

/* Up to SAMPLES_BATCH samples into their cells; what is refused goes to `left`. */
bool py_group_table_put_samples(GroupTableObject *self, PyObject *const *samples, Py_ssize_t count,
                                double now_s, PyObject *left);

/* What module.c adds. */
extern PyMethodDef py_client_lease_functions[];
bool py_client_lease_add_objects(PyObject *module);
extern const struct named_value py_delivery_constants[];
extern PyMethodDef py_delivery_functions[];
bool py_delivery_add_objects(PyObject *module);
extern PyMethodDef py_group_functions[];
bool py_group_add_objects(PyObject *module);
extern const struct named_value py_group_table_constants[];

#endif
