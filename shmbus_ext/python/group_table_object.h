/* What group_table_object.c (the table), group_lists.c (what left it) and reader_object.c (what fills it) share. */
#ifndef SHMBUS_PYTHON_GROUP_TABLE_OBJECT_H
#define SHMBUS_PYTHON_GROUP_TABLE_OBJECT_H

#include "binding.h"

/* Samples looked at together, so that the cache misses of one overlap with those of the others; few
 * enough for the pages of samples, entries and rows to stay in the first level of the TLB. */
#define ROWS_BATCH 16

enum row_place { ROW_NOWHERE = 0, ROW_READY, ROW_LEASED };

/* A row that left its table, or a copy of one that is in it. */
typedef struct row_object {
    PyObject_HEAD
    PyObject *key;
    PyObject *samples; /* list, by index */
    struct rows_object *rows; /* of the list that it is in, or NULL */
    struct row_object *previous, *next;
    enum row_place place;
    double born_s;
    long long nbytes;
    uint64_t leased_ns; /* when it was leased last; CLOCK_MONOTONIC */
    unsigned int size;
    unsigned int missing;
} GroupEntryObject;

/* Owns a reference to each of its rows. */
struct row_list {
    GroupEntryObject *first, *last;
    uint64_t rows;
    uint64_t cells;
};

typedef struct rows_object {
    PyObject_HEAD
    struct group_table c;
    uint64_t cells;  /* that are filled */
    uint64_t nbytes; /* of the samples in them, where they are counted */
    bool count_bytes;
    bool judged;      /* full rows are left to the caller */
    PyObject *recent; /* dict */
    /* Groups that are kept elsewhere, by key, and the samples in those; the stash's. */
    PyObject *apart;
    uint64_t failing_cells;
    struct row_list ready, leased;
} GroupTableObject;

/* Up to ROWS_BATCH samples into their cells; what is refused or to be judged is appended to `left`.
 * False with an exception. */
bool rows_put_samples(GroupTableObject *self, PyObject *const *samples, Py_ssize_t count, double now_s,
                      PyObject *left);

/* A row as an object, without its samples yet. */
GroupEntryObject *row_new(const struct group_entry *row, PyObject *key);
void rows_push_ready(GroupTableObject *self, GroupEntryObject *row);
void rows_clear_lists(GroupTableObject *self);

/* The methods of GroupTable that are not the table's. */
PyObject *rows_py_push(GroupTableObject *self, PyObject *row);
PyObject *rows_lease(GroupTableObject *self, PyObject *limit);
PyObject *rows_end_lease(GroupTableObject *self, PyObject *row);
PyObject *rows_give_back(GroupTableObject *self, PyObject *row);
PyObject *rows_is_leased(GroupTableObject *self, PyObject *row);
PyObject *rows_ready_samples(GroupTableObject *self, PyObject *ignored);
PyObject *rows_full(GroupTableObject *self, PyObject *key);

#endif
