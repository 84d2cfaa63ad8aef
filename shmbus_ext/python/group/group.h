/* Groups for Python: assembly, delivery to a consumer, and their end by a client. */
#pragma once

#include "python/binding.h"
#include "python/list.h"
#include "python/record/record.h"
#include "ring/layout.h"
#include "stash/group_table.h"

/* ---- Entries of complete groups, and their two lists: ready and leased. */
enum entry_place { ENTRY_NOWHERE = 0, ENTRY_READY, ENTRY_LEASED };

/* A key's split shares a byte with the kind of its text (PyUnicode_KIND: 1, 2 or 4). */
#define KEY_KIND_BITS 4
_Static_assert((SHMBUS_MAX_SPLITS - 1) << KEY_KIND_BITS <= UINT8_MAX, "a byte has room for both");

static inline uint32_t py_entry_split(const struct group_entry *entry) {
    return (uint32_t)entry->key_kind >> KEY_KIND_BITS;
}

/* A group taken from its table, or a copy of a group still in the table. */
typedef struct group_entry_object {
    PyObject_HEAD
    PyObject *key;
    PyObject *samples;         /* list, by index */
    struct group_lists *lists; /* the lists holding the entry, or NULL */
    struct list_link link;
    struct group_entry_object *same_key; /* next entry of the key in `by_key` */
    enum entry_place place;
    double born_s;
    long long nbytes;
    uint64_t leased_ns; /* time of the last lease; CLOCK_MONOTONIC */
    uint64_t leases;    /* number of leases so far */
    unsigned int size;
    unsigned int need;    /* samples of a complete group */
    unsigned int missing; /* of those */
    unsigned int split;   /* its number */
} GroupEntryObject;
extern PyTypeObject GroupEntryType;

/* Owns a reference to every entry. */
struct entry_list {
    struct list_link entries;
    uint64_t groups;
    uint64_t samples;
};

/* Head of a GroupTableObject. */
typedef struct group_lists {
    PyObject_HEAD
    struct entry_list leased;
    struct entry_list ready[SHMBUS_MAX_SPLITS];
    uint64_t ready_groups, ready_samples; /* over every split */
    struct {
        uint64_t groups, samples;
    } leased_of[SHMBUS_MAX_SPLITS];
    PyObject *by_key; /* dict: newest entry of each key; NULL before the first call of full() */
} GroupListsObject;

/* Lease at most `limit` entries of a split in order of readiness; NULL with an exception and no
 * lease. */
PyObject *py_group_lists_lease_ready(GroupListsObject *self, uint32_t split, Py_ssize_t limit,
                                     uint64_t now_ns);
/* Return a leased entry to the front of the ready list. */
void py_group_entry_give_back(GroupEntryObject *entry);
/* Remove a leased entry from its list. */
void py_group_entry_end(GroupEntryObject *entry);
/* True for an entry under lease from these lists. */
bool py_group_lists_have_leased(const GroupListsObject *self, const PyObject *object);
/* Time of the oldest lease, or 0; CLOCK_MONOTONIC. */
uint64_t py_group_lists_leased_since(const GroupListsObject *self);


/* ---- ClientLease: one group leased by a daemon to this process, and the wire form of its
 * places. */
/* Replaces a reason while the lease lasts. */
#define LEASE_HELD (-1)

/* Wire form of a place between daemon and client: native numbers, one host. */
struct wire_place {
    uint32_t extent;
    uint32_t generation;
    uint64_t offset;
    uint64_t bytes;
};

typedef struct {
    PyObject_VAR_HEAD
    HolderObject *borrower;
    PyObject *key;     /* NULL, like `samples`, until read */
    PyObject *samples; /* list, by index */
    long long number;  /* assigned by the daemon; a claim by the next daemon changes it */
    long long step;    /* the ranks' step; -1 without ranks */
    unsigned int size; /* samples of a complete group */
    int reason;        /* reason of the local end; LEASE_HELD until then */
    bool lost;         /* unknown to the next daemon */
    bool locked;       /* records counted in their extents' lease locks */
    struct record_ref refs[];
} ClientLeaseObject;
extern PyTypeObject ClientLeaseType;

static inline Py_ssize_t py_client_lease_records(const ClientLeaseObject *self) {
    return Py_SIZE(self);
}

/* Make a lease from a grant's places; NULL with an exception, or without one for places outside
 * this segment. */
ClientLeaseObject *py_client_lease_new(HolderObject *borrower, PyObject *granted, long long step);

/* ---- Delivery figures of the segment, counted when groups are leased. */
/* Count entries at their first lease; other list items are skipped. */
void py_delivery_count(SegmentObject *segment, PyObject *entries);

/* ---- GroupBase: the base of shmbus.Group. */
extern PyTypeObject GroupBaseType;

/* A group of a subtype of GroupBase. */
PyObject *py_group_new(PyTypeObject *type, PyObject *consumer, PyObject *lease);
/* The group's lease, borrowed, if held by this consumer; otherwise NULL without an exception. */
PyObject *py_group_lease(PyObject *group, PyObject *consumer);
void py_group_set_state(PyObject *group, PyObject *state);
/* A new list of the groups' trajectories, and the group sizes: int64 [G]. NULL on error. */
PyObject *py_group_members(PyObject *groups, PyObject **sizes);

/* ---- GroupTable: samples in cells by key, until their group is complete. */
/* Samples read together, to overlap their cache misses; few enough for the pages of samples,
 * entries and groups to stay in the first-level TLB. */
#define SAMPLES_BATCH 16

/* Open groups and filled cells of one split. */
struct open_count {
    uint64_t groups, cells;
};

typedef struct {
    GroupListsObject lists; /* complete groups */
    struct group_table c;
    uint64_t cells;  /* filled cells */
    uint64_t accepted; /* samples put into a cell so far */
    uint64_t nbytes; /* bytes of the samples in cells, if counted */
    struct open_count open[SHMBUS_MAX_SPLITS];
    uint32_t splits_met; /* a bit per split seen */
    bool count_bytes;
    bool judged;      /* complete groups go to the caller */
    PyObject *recent; /* dict */
    /* Failing groups by key, and the number of their samples; kept by the stash. */
    PyObject *failing;
    uint64_t failing_cells;
    /* Leased groups held by no client, and their samples; set by the daemon, for messages. */
    uint64_t unheld_groups, unheld_cells;
    PyObject *cancelled; /* list: keys of groups ended with samples missing */
} GroupTableObject;
extern PyTypeObject GroupTableType;

/* Outcome of one sample. */
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

/* Put up to SAMPLES_BATCH samples into their cells; refused samples go to `left`. */
bool py_group_table_put_samples(GroupTableObject *self, PyObject *const *samples, Py_ssize_t count,
                                double now_s, PyObject *left);

/* FIGURE_BOUNDS: upper bounds of the buckets, per figure. */
PyObject *py_figure_bounds(void);
/* Registered by module.c. */
extern PyMethodDef py_client_lease_functions[];
extern PyMethodDef py_delivery_functions[];
