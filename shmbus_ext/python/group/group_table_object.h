/* GroupTable: samples in cells by key, until their group is complete. */
#ifndef SHMBUS_PYTHON_GROUP_TABLE_OBJECT_H
#define SHMBUS_PYTHON_GROUP_TABLE_OBJECT_H

#include "python/group/group_lists.h"

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

/* Up to SAMPLES_BATCH samples into their cells; what is refused or to be judged is appended to
 * `left`. False with an exception. */
bool py_group_table_put_samples(GroupTableObject *self, PyObject *const *samples, Py_ssize_t count,
                                double now_s, PyObject *left);
bool py_group_table_add_constants(PyObject *module);

#endif
