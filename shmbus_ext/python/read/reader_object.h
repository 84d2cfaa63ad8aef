/* Reader: what shmbus.Consumer reads the ring with. */
#ifndef SHMBUS_PYTHON_READER_OBJECT_H
#define SHMBUS_PYTHON_READER_OBJECT_H

#include "python/group/group_table_object.h"
#include "python/record/holder.h"
#include "ring/reader.h"

typedef struct {
    HOLDER_HEAD
    struct reader c;
    bool cut_short;   /* memory failed between the ring and the stash: what that has may be torn */
    bool wakes_often; /* the last sleep was short: producers are at work */
} ReaderObject;
extern PyTypeObject ReaderType;

/* Whether the reader can be used in this process; sets no exception. */
bool py_reader_is_open(const ReaderObject *self);
/* The same, with an exception. */
bool py_reader_usable(ReaderObject *self);
/* The same, and that nothing was lost between the ring and the stash. */
bool py_reader_can_read(ReaderObject *self);
/* Of an exception that has come between the two: after a MemoryError nothing more is read. */
void py_reader_note_failure(ReaderObject *self);
/* Up to `limit` records into the table; what it refuses, or leaves to be judged, is appended to
 * `left`. How many were read, or -1 with an exception. */
Py_ssize_t py_reader_poll_records(ReaderObject *self, GroupTableObject *table, Py_ssize_t limit,
                                  double now_s, PyObject *left);
/* Releases trajectories of this reader in the ring, all of them or, with an exception, none. */
bool py_reader_release_all(ReaderObject *self, PyObject *items, int reason);
/* Notes when the ring was read last, for others. */
void py_reader_note_seen(ReaderObject *self, uint64_t now_ns);
enum wait_result { WAIT_FAILED = -1, WAIT_OVER = 0, WAIT_WOKEN = 1 };
/* Sleeps until records may have arrived, at most timeout_s; WAIT_FAILED with an exception. While
 * they come within awake_ns of each other, it looks for them without sleeping: for at most that
 * much longer than timeout_s. */
enum wait_result py_reader_wait_for_events(ReaderObject *self, double timeout_s, uint64_t awake_ns);
/* Writes what others can read of this consumer. */
void py_reader_note_table(ReaderObject *self, const GroupTableObject *table);

#endif
