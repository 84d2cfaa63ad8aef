/* Reader: the ring access of shmbus.Consumer.
 *
 * Invariant: one Reader per segment, proved by the collector's file lock. The interpreter lock
 * serialises its calls; it is released only during the reader's sleep. */
#define _GNU_SOURCE
#include "python/read/read.h"

#include <sched.h>

#include "python/hooks.h"
#include "python/put/put.h"
#include "ring/observe.h"
#include "base/clock.h"
#include "base/file_lock.h"
#include "ring/intent_log.h"

/* Interval of wake-ups for signals during a sleep. */
#define SLEEP_SLICE_NS INT64_C(1000000000)
/* A shorter sleep costs more than polling: falling asleep and waking take about as long. */
#define WAKES_OFTEN_NS UINT64_C(50000)

static bool hold_records(HolderObject *self, const struct record_ref *refs, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        reader_hold(&((ReaderObject *)self)->c, &refs[i]);
    }
    return true;
}

static void let_go_of_records(HolderObject *self, const struct record_ref *refs,
                              Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        reader_let_go(&((ReaderObject *)self)->c, &refs[i]);
    }
}

static const struct holder_kind reader_kind = {true, hold_records, let_go_of_records, NULL};

bool py_reader_is_open(const ReaderObject *self) {
    return self->attached && self->segment->generation == fork_generation &&
           !self->segment->handle_closed;
}

bool py_reader_usable(ReaderObject *self) {
    return py_holder_usable((HolderObject *)self);
}

void py_reader_note_failure(ReaderObject *self) {
    self->cut_short = self->cut_short || PyErr_ExceptionMatches(PyExc_MemoryError);
}

/* The stash may already know a lost sample, for example of a full group: a second read would count
 * as a duplicate and be dropped. Only the next reader sees the sample correctly. */
bool py_reader_can_read(ReaderObject *self) {
    if (!py_reader_usable(self)) {
        return false;
    }
    if (self->orphans > 0 || self->cut_short) {
        return py_refuse(
            hooks.closed_error,
            "bus %R: this Consumer reads no more, since a call failed half way (out of "
            "memory?) with samples in its hands; acknowledge the groups that you hold, "
            "close it and make a new one: it gets all others",
            self->segment->name);
    }
    return true;
}

static void note_collector(SegmentObject *segment, const char *label) {
    struct bus_header *header = segment->c.header;
    size_t length = strlen(label);
    if (length >= SHMBUS_LABEL_BYTES) {
        length = SHMBUS_LABEL_BYTES - 1;
    }
    memset(header->collector_label, 0, SHMBUS_LABEL_BYTES);
    memcpy(header->collector_label, label, length);
    SET_RELAXED(header->collector_pid, (uint32_t)segment->pid);
}

static int py_reader_init(ReaderObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", "label", NULL};
    PyObject *segment;
    const char *label;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!s", names, &SegmentType, &segment, &label)) {
        return -1;
    }
    NEVER(self->segment != NULL, -1);
    if (!py_holder_init((HolderObject *)self, (SegmentObject *)segment, &reader_kind) ||
        !py_segment_usable(self->segment, "handle")) {
        return -1;
    }
    enum lock_status lock = file_lock_take(self->segment->c.fd, SHMBUS_LOCK_COLLECTOR);
    if (lock == LOCK_ERROR) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->segment->name);
        return -1;
    }
    if (lock == LOCK_HELD_ELSEWHERE) {
        py_raise_hook(hooks.busy_error, Py_BuildValue("(Os)", segment, "collector"));
        return -1;
    }
    if (!reader_attach(&self->c, &self->segment->c)) {
        file_lock_drop(self->segment->c.fd, SHMBUS_LOCK_COLLECTOR);
        PyErr_NoMemory();
        return -1;
    }
    recovery_reserve(&self->segment->c);
    note_collector(self->segment, label);
    self->attached = true;
    return 0;
}

void py_reader_note_seen(ReaderObject *self, uint64_t now_ns) {
    SET_RELAXED(self->segment->c.header->collector_seen_ns, now_ns);
}

/* The next trajectory; NULL without an exception at the end, NULL with an exception on error. */
static PyObject *next_trajectory(ReaderObject *self) {
    struct record_ref ref;
    int status = reader_next(&self->c, &ref);
    if (status < 0) {
        return PyErr_NoMemory();
    }
    if (status == 0) {
        return NULL;
    }
    TrajectoryObject *t = py_trajectory_new((HolderObject *)self, &self->c.copy, &ref);
    self->orphans += t == NULL;
    return (PyObject *)t;
}

/* poll(limit) -> list[Trajectory]: committed records not yet handed out. */
static PyObject *py_reader_poll(ReaderObject *self, PyObject *argument) {
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    if ((limit == -1 && PyErr_Occurred()) || !py_reader_can_read(self)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    py_reader_note_seen(self, clock_monotonic_ns());
    while (found != NULL && PyList_GET_SIZE(found) < limit) {
        PyObject *t = next_trajectory(self);
        if (t == NULL) {
            break;
        }
        py_list_add(&found, t);
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(found);
    }
    return found;
}

Py_ssize_t py_reader_poll_records(ReaderObject *self, GroupTableObject *table, Py_ssize_t limit,
                                  double now_s, PyObject *left) {
    PyObject *batch[SAMPLES_BATCH];
    Py_ssize_t total = 0;
    Py_ssize_t count = SAMPLES_BATCH;
    bool good = true;
    while (good && count == SAMPLES_BATCH && total < limit) {
        count = 0;
        while (count < SAMPLES_BATCH && total + count < limit &&
               (batch[count] = next_trajectory(self)) != NULL) {
            count++;
        }
        good = !PyErr_Occurred() && py_group_table_put_samples(table, batch, count, now_s, left);
        for (Py_ssize_t i = 0; i < count; i++) {
            Py_DECREF(batch[i]);
        }
        total += count;
    }
    if (!good) {
        py_reader_note_failure(self);
    }
    return good ? total : -1;
}

/* poll_into(table, limit, now_s, left) -> int: poll and GroupTable.put in one, without an
 * intermediate list. Return the number of records read; the result of put goes to `left`. */
static PyObject *py_reader_poll_into(ReaderObject *self, PyObject *args) {
    PyObject *table, *left;
    Py_ssize_t limit;
    double now_s;
    if (!PyArg_ParseTuple(args, "O!ndO!", &GroupTableType, &table, &limit, &now_s, &PyList_Type,
                          &left) ||
        !py_reader_can_read(self)) {
        return NULL;
    }
    py_reader_note_seen(self, clock_monotonic_ns());
    Py_ssize_t count = py_reader_poll_records(self, (GroupTableObject *)table, limit, now_s, left);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

/* A reader sleeping on a producer's processor wakes at the next record, takes the record and sleeps
 * again: two context switches per record. An awake reader queued behind the producer finds every
 * record committed until the producer yields. On an uncontended processor the yield costs one short
 * system call, and one more per poll. WAIT_OVER: go to sleep. */
static enum wait_result let_producers_run(ReaderObject *self, uint64_t until_ns) {
    do {
        Py_BEGIN_ALLOW_THREADS
        sched_yield();
        Py_END_ALLOW_THREADS
        /* Check signals here too: records can keep the reader awake without a sleep. */
        if (Py_MakePendingCalls() < 0 || !py_reader_usable(self)) {
            return WAIT_FAILED;
        }
        self->wakes_often = reader_has_events(&self->c);
    } while (!self->wakes_often && clock_monotonic_ns() < until_ns);
    return self->wakes_often ? WAIT_WOKEN : WAIT_OVER;
}

enum wait_result py_reader_wait_for_events(ReaderObject *self, double timeout_s,
                                           uint64_t awake_ns) {
    struct bus_header *header = self->segment->c.header;
    reader_tidy_in_a_pause(&self->c);
    if (reader_has_events(&self->c)) {
        /* Check signals here: with records faster than the reader's looks no other check runs. */
        return Py_MakePendingCalls() < 0 || !py_reader_usable(self) ? WAIT_FAILED : WAIT_WOKEN;
    }
    if (timeout_s == 0) {
        return WAIT_OVER;
    }
    uint64_t start = clock_monotonic_ns();
    SegmentObject *segment = (SegmentObject *)Py_NewRef((PyObject *)self->segment);
    enum wait_result result = self->wakes_often ? let_producers_run(self, start + awake_ns) : WAIT_OVER;
    if (result != WAIT_OVER) {
        Py_DECREF(segment);
        return result;
    }
    enum bell_wait woken = BELL_TIMEOUT;
    while (woken == BELL_TIMEOUT) {
        double left_ns = timeout_s < 0 ? (double)SLEEP_SLICE_NS
                                       : timeout_s * 1e9 - (double)(clock_monotonic_ns() - start);
        if (left_ns <= 0) {
            break;
        }
        int64_t slice_ns = left_ns < (double)SLEEP_SLICE_NS ? (int64_t)left_ns + 1 : SLEEP_SLICE_NS;
        doorbell_announce(header);
        if (reader_has_events(&self->c)) {
            doorbell_stay(header);
            woken = BELL_RUNG;
            break;
        }
        Py_BEGIN_ALLOW_THREADS
        woken = doorbell_sleep(header, slice_ns);
        Py_END_ALLOW_THREADS
        if (Py_MakePendingCalls() < 0 || !py_reader_usable(self)) {
            Py_DECREF(segment);
            return WAIT_FAILED;
        }
    }
    Py_DECREF(segment);
    /* Measured from the start: a record arriving later than the awake time would not justify
     * staying awake. */
    const uint64_t often_ns = awake_ns > WAKES_OFTEN_NS ? awake_ns : WAKES_OFTEN_NS;
    self->wakes_often = woken == BELL_RUNG && clock_monotonic_ns() - start < often_ns;
    return woken == BELL_RUNG ? WAIT_WOKEN : WAIT_OVER;
}

/* wait(timeout_s | None) -> bool: sleep until events may have come. */
static PyObject *py_reader_wait(ReaderObject *self, PyObject *argument) {
    double timeout_s;
    if (!py_parse_timeout(argument, &timeout_s) || !py_reader_usable(self)) {
        return NULL;
    }
    enum wait_result result = py_reader_wait_for_events(self, timeout_s, 0);
    return result == WAIT_FAILED ? NULL : PyBool_FromLong(result == WAIT_WOKEN);
}

/* Wake a thread of this process sleeping in wait(). */
static PyObject *py_reader_wake(ReaderObject *self, PyObject *Py_UNUSED(ignored)) {
    if (self->segment != NULL && self->segment->generation == fork_generation) {
        doorbell_ring(self->segment->c.header);
    }
    Py_RETURN_NONE;
}

static TrajectoryObject *own_trajectory(ReaderObject *self, PyObject *item) {
    NEVER(!Py_IS_TYPE(item, &TrajectoryType) ||
          ((TrajectoryObject *)item)->holder != (HolderObject *)self, NULL);
    return (TrajectoryObject *)item;
}

/* True for unreleased trajectories of this reader; false with an exception. */
static bool can_release(ReaderObject *self, PyObject *items) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        TrajectoryObject *t = own_trajectory(self, PyList_GET_ITEM(items, i));
        if (t == NULL) {
            return false;
        }
        NEVER(t->released, false);
    }
    return true;
}

/* Release trajectories of this reader in the ring, all or, with an exception, nothing. */
static bool py_reader_release_all(ReaderObject *self, PyObject *items, int reason) {
    Py_ssize_t count = PyList_GET_SIZE(items);
    NEVER(reason < 0 || reason >= SHMBUS_REASONS, false);
    if (!can_release(self, items)) {
        return false;
    }
    const struct record_ref *few[64];
    const struct record_ref **refs =
        count <= 64 ? few : PyMem_Malloc((size_t)count * sizeof *refs);
    if (refs == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        refs[i] = &((TrajectoryObject *)PyList_GET_ITEM(items, i))->ref;
    }
    if (count > 0) {
        uint32_t split = ((TrajectoryObject *)PyList_GET_ITEM(items, 0))->split;
        intent_log_release(self->c.segment, refs, (uint32_t)count, (enum shmbus_reason)reason,
                           split);
    }
    if (refs != few) {
        PyMem_Free((void *)refs);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        TrajectoryObject *t = (TrajectoryObject *)PyList_GET_ITEM(items, i);
        t->released = true;
        t->held = false;
        if (t->pin != NULL) {
            Py_CLEAR(t->pin);
        } else {
            reader_let_go(&self->c, &t->ref);
        }
    }
    return true;
}

/* release(trajectories, reason): end trajectories atomically; the last view's end frees their
 * space. */
static PyObject *py_reader_release(ReaderObject *self, PyObject *args) {
    PyObject *items;
    int reason;
    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &items, &reason) || !py_reader_usable(self)) {
        return NULL;
    }
    NEVER(PyList_GET_SIZE(items) > (Py_ssize_t)SHMBUS_MAX_GROUP_SIZE, NULL);
    return py_reader_release_all(self, items, reason) ? Py_NewRef(Py_None) : NULL;
}

/* (id, round, split, origin) of a committed record; NULL for a damaged header. */
static PyObject *name_record(const struct segment *segment, const struct record_header *shared,
                             const struct record_header *head) {
    uint64_t at = sizeof *head + (uint64_t)head->shape_words * 8;
    if (at + head->id_bytes > head->record_bytes) {
        return NULL;
    }
    uint8_t origin[RELAY_ORIGIN_BYTES];
    origin_pack(origin, segment->header->identity, head->producer_id, head->sequence);
    return Py_BuildValue("(NNIy#)",
                         PyUnicode_DecodeUTF8((const char *)shared + at, head->id_bytes, "replace"),
                         py_round(head->round), head->split, (const char *)origin,
                         (Py_ssize_t)sizeof origin);
}

/* Append the live records of a run to a list; return the number of records visited. */
static uint64_t add_live(const struct reader *reader, uint32_t extent, PyObject **found) {
    const struct segment *segment = reader->segment;
    const struct run_state *run = &reader->runs[extent];
    uint64_t limit = run->span * segment->extent_bytes;
    uint64_t used = ACQUIRE(segment->extents[extent].used);
    struct record_place place = {extent, run->generation, 0};
    struct record_header head;
    uint64_t visited = 0;
    for (used = Py_MIN(used, limit); place.offset < used; place.offset += head.record_bytes) {
        const struct record_header *shared = record_of(segment, &place);
        if (record_read_frame(shared, used - place.offset, &place, &head) != RECORD_OK) {
            break;
        }
        visited++;
        PyObject *name = shmbus_is_committed(RELAXED(head.state))
                             ? name_record(segment, shared, &head)
                             : NULL;
        if (name != NULL) {
            py_list_add(found, name);
        }
        if (*found == NULL || PyErr_Occurred()) {
            Py_CLEAR(*found);
            break;
        }
    }
    return visited;
}

/* stragglers(most) -> [(id, round, split, origin)]: live records of nearly empty runs. Continues
 * from the run after the last call's, until `most` records were visited. */
static PyObject *py_reader_stragglers(ReaderObject *self, PyObject *argument) {
    unsigned long most = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !py_reader_usable(self)) {
        return NULL;
    }
    struct reader *reader = &self->c;
    const uint32_t extents = self->segment->c.extent_count;
    PyObject *found = PyList_New(0);
    uint64_t visited = 0;
    for (uint32_t looked = 0; found != NULL && looked < extents && visited < most; looked++) {
        if (reader_run_is_sparse(reader, reader->sparse_at)) {
            visited += add_live(reader, reader->sparse_at, &found);
        }
        reader->sparse_at = (reader->sparse_at + 1) % extents;
    }
    return found;
}

/* evacuate(trajectories) -> runs freed. Move the listed records of sparse runs: at most half of the
 * run alive, every live record in this list, no view out. */
static PyObject *py_reader_evacuate(ReaderObject *self, PyObject *items) {
    NEVER(!PyList_Check(items), NULL);
    if (!py_reader_usable(self)) {
        return NULL;
    }
    struct reader *reader = &self->c;
    uint64_t freed = reader->runs_freed;
    Py_ssize_t count = PyList_GET_SIZE(items);
    uint32_t *movable = PyMem_Calloc(self->segment->c.extent_count, sizeof *movable);
    if (movable == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        TrajectoryObject *t = own_trajectory(self, PyList_GET_ITEM(items, i));
        if (t == NULL) {
            PyMem_Free(movable);
            return NULL;
        }
        if (t->held && t->pin == NULL) {
            movable[t->ref.place.extent]++;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        TrajectoryObject *t = (TrajectoryObject *)PyList_GET_ITEM(items, i);
        const uint32_t extent = t->ref.place.extent;
        if (!t->held || t->pin != NULL || !reader_run_is_sparse(reader, extent) ||
            reader->runs[extent].live != movable[extent]) {
            continue;
        }
        movable[extent]--;
        if (!reader_move(reader, &t->ref)) {
            break;
        }
    }
    PyMem_Free(movable);
    reader_tidy(reader);
    return PyLong_FromUnsignedLongLong(reader->runs_freed - freed);
}

/* sweep(most=RECOVERY_SHARE) -> int: dead producers found; stops after `most` living producers. */
static PyObject *py_reader_sweep(ReaderObject *self, PyObject *args) {
    unsigned int most = RECOVERY_SHARE;
    if (!PyArg_ParseTuple(args, "|I", &most) || !py_reader_usable(self)) {
        return NULL;
    }
    removal_note(&self->segment->c);
    recovery_reserve(&self->segment->c);
    return PyLong_FromUnsignedLong(reader_sweep(&self->c, most));
}

static PyObject *py_reader_tidy(ReaderObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_reader_usable(self)) {
        return NULL;
    }
    reader_tidy(&self->c);
    Py_RETURN_NONE;
}

/* count_unread() -> (committed, unread), at the same instant. */
static PyObject *py_reader_count_unread(ReaderObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_reader_usable(self)) {
        return NULL;
    }
    uint64_t committed;
    uint64_t unread = reader_count_unread(&self->c, &committed) + self->orphans;
    return Py_BuildValue("(KK)", U64(committed), U64(unread));
}

/* Publish the waiting samples per split seen by this reader. */
static void note_splits(ReaderObject *self, const GroupTableObject *table) {
    for (uint32_t split = 0; table->splits_met >> split != 0; split++) {
        struct split_entry *entry = &self->segment->c.splits[split];
        const struct open_count *open = &table->open[split];
        const struct entry_list *ready = &table->lists.ready[split];
        SET_RELAXED(entry->stashed, open->cells + ready->samples);
        SET_RELAXED(entry->ready_groups, (uint32_t)ready->groups);
        SET_RELAXED(entry->open_groups, (uint32_t)open->groups);
    }
}

/* Announce to producers the groups without need of further samples. */
static void tell_cancelled(ReaderObject *self, const GroupTableObject *table) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(table->cancelled); i++) {
        uint64_t hash;
        if (py_key_hash(PyList_GET_ITEM(table->cancelled, i), &hash)) {
            cancelled_add(&self->segment->c, hash);
        }
    }
    if (PyList_GET_SIZE(table->cancelled) > 0) {
        (void)PyList_SetSlice(table->cancelled, 0, PyList_GET_SIZE(table->cancelled), NULL);
    }
}

void py_reader_note_table(ReaderObject *self, const GroupTableObject *table) {
    struct bus_header *h = self->segment->c.header;
    /* Leases may have ended since the daemon's count. */
    uint64_t leased_groups = table->lists.leased.groups;
    uint64_t leased_samples = table->lists.leased.samples;
    uint64_t unheld_groups = Py_MIN(table->unheld_groups, leased_groups);
    uint64_t unheld_cells = Py_MIN(table->unheld_cells, leased_samples);
    SET_RELAXED(h->collector_leased_groups, (uint32_t)(leased_groups - unheld_groups));
    SET_RELAXED(h->collector_leased_records, leased_samples - unheld_cells);
    SET_RELAXED(h->collector_stashed_groups, table->c.count + table->lists.ready_groups +
                                                 (uint64_t)PyDict_GET_SIZE(table->failing) +
                                                 unheld_groups);
    SET_RELAXED(h->collector_stashed_records,
                table->cells + table->lists.ready_samples + table->failing_cells + unheld_cells);
    SET_RELAXED(h->collector_lease_ns, py_group_lists_leased_since(&table->lists));
    note_splits(self, table);
    tell_cancelled(self, table);
}

/* note(table): publish this consumer's counts for other processes. */
static PyObject *py_reader_note(ReaderObject *self, PyObject *argument) {
    NEVER(!Py_IS_TYPE(argument, &GroupTableType), NULL);
    if (!py_reader_usable(self)) {
        return NULL;
    }
    py_reader_note_table(self, (const GroupTableObject *)argument);
    Py_RETURN_NONE;
}

/* Allow other processes to borrow this reader's records, for the bus's life. */
static PyObject *py_reader_lend(ReaderObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_reader_usable(self)) {
        return NULL;
    }
    SET_RELAXED(self->segment->c.header->lent, 1);
    Py_RETURN_NONE;
}

/* Announce packing of payload, here or by a borrower: producers then write payload past their
 * caches. */
static PyObject *py_reader_note_packing(ReaderObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_reader_usable(self)) {
        return NULL;
    }
    py_holder_note_packing((HolderObject *)self);
    Py_RETURN_NONE;
}

static void py_reader_detach(ReaderObject *self) {
    if (!self->attached) {
        return;
    }
    self->attached = false;
    struct bus_header *header = self->segment->c.header;
    if (self->segment->generation == fork_generation) {
        writer_seal(&self->c.mover);
        SET_RELAXED(header->collector_leased_groups, 0);
        SET_RELAXED(header->collector_leased_records, 0);
        SET_RELAXED(header->collector_pid, 0);
    }
    /* Views get private copies before the lock passes the space to the next reader. */
    py_segment_release_handle(self->segment);
    reader_detach(&self->c);
}

static PyObject *py_reader_close(ReaderObject *self, PyObject *Py_UNUSED(ignored)) {
    py_reader_detach(self);
    Py_RETURN_NONE;
}

static void py_reader_dealloc(ReaderObject *self) {
    if (self->segment != NULL) {
        py_reader_detach(self);
    }
    py_holder_clear((HolderObject *)self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef reader_methods[] = {
    METHOD("poll", py_reader_poll, METH_O, NULL),
    METHOD("poll_into", py_reader_poll_into, METH_VARARGS, NULL),
    METHOD("wait", py_reader_wait, METH_O, NULL),
    METHOD("wake", py_reader_wake, METH_NOARGS, NULL),
    METHOD("release", py_reader_release, METH_VARARGS, NULL),
    METHOD("evacuate", py_reader_evacuate, METH_O, NULL),
    METHOD("stragglers", py_reader_stragglers, METH_O, NULL),
    METHOD("sweep", py_reader_sweep, METH_VARARGS, NULL),
    METHOD("tidy", py_reader_tidy, METH_NOARGS, NULL),
    METHOD("count_unread", py_reader_count_unread, METH_NOARGS, NULL),
    METHOD("note", py_reader_note, METH_O, NULL),
    METHOD("lend", py_reader_lend, METH_NOARGS, NULL),
    METHOD("note_packing", py_reader_note_packing, METH_NOARGS, NULL),
    METHOD("close", py_reader_close, METH_NOARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef reader_members[] = {
    {"segment", T_OBJECT_EX, offsetof(ReaderObject, segment), READONLY, NULL},
    {"delivered", T_ULONGLONG, offsetof(ReaderObject, c.delivered), READONLY, NULL},
    {"moves", T_ULONGLONG, offsetof(ReaderObject, c.moves), READONLY, NULL},
    {"attached", T_BOOL, offsetof(ReaderObject, attached), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ReaderType = {
    TYPE_BASICS("Reader", ReaderObject, py_reader_dealloc, 0),
    .tp_methods = reader_methods,
    .tp_members = reader_members,
    .tp_init = (initproc)py_reader_init,
    .tp_new = PyType_GenericNew,
};

/* ---- The end of a lease: one call releases records in the ring, removes entries from their table
 * and sets the groups' new state.
 *
 * Invariant: between the first and the last of these steps no Python code and hence no signal
 * handler runs; a lease ends for the ring, the table and the group together. */
/* The entry, borrowed, of a group leased by this consumer from this table; otherwise NULL without
 * an exception. */
static GroupEntryObject *entry_of(PyObject *group, PyObject *consumer,
                                  const GroupTableObject *table) {
    PyObject *lease = py_group_lease(group, consumer);
    return lease != NULL && py_group_lists_have_leased(&table->lists, lease)
               ? (GroupEntryObject *)lease
               : NULL;
}

/* end_groups(reader, table, consumer, groups, reason, state) -> int: end the groups' leases in
 * order, up to the first group not held by this consumer; return their count. A lease ends in the
 * ring, in the table and in its group in one uninterruptible step. */
static PyObject *py_end_groups(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *reader, *table, *consumer, *groups, *state;
    int reason;
    if (!PyArg_ParseTuple(args, "O!O!OO!iU", &ReaderType, &reader, &GroupTableType, &table,
                          &consumer, &PyList_Type, &groups, &reason, &state) ||
        !py_reader_usable((ReaderObject *)reader)) {
        return NULL;
    }
    Py_ssize_t done = 0;
    for (; done < PyList_GET_SIZE(groups); done++) {
        PyObject *group = PyList_GET_ITEM(groups, done);
        GroupEntryObject *entry = entry_of(group, consumer, (GroupTableObject *)table);
        if (entry == NULL) {
            break;
        }
        if (!py_reader_release_all((ReaderObject *)reader, entry->samples, reason)) {
            return NULL;
        }
        py_group_entry_end(entry);
        py_group_set_state(group, state);
    }
    return PyLong_FromSsize_t(done);
}

/* give_back_group(reader, table, consumer, group, state) -> bool: return the group to the front of
 * the ready list, in one step like end_groups; False if not held by this consumer. */
static PyObject *py_give_back_group(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *reader, *table, *consumer, *group, *state;
    if (!PyArg_ParseTuple(args, "O!O!OOU", &ReaderType, &reader, &GroupTableType, &table, &consumer,
                          &group, &state) ||
        !py_reader_usable((ReaderObject *)reader)) {
        return NULL;
    }
    GroupEntryObject *entry = entry_of(group, consumer, (GroupTableObject *)table);
    if (entry == NULL) {
        Py_RETURN_FALSE;
    }
    py_group_entry_give_back(entry);
    py_group_set_state(group, state);
    /* Also wakes a thread sleeping in take. */
    doorbell_ring(((ReaderObject *)reader)->segment->c.header);
    Py_RETURN_TRUE;
}

PyMethodDef py_end_lease_functions[] = {
    {"end_groups", py_end_groups, METH_VARARGS, NULL},
    {"give_back_group", py_give_back_group, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
