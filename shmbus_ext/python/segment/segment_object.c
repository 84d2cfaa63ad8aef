/* Segment: one mapping of a bus, and its treatment at fork and at close. */
#include "python/segment/segment.h"

#include <pthread.h>
#include <unistd.h>

#include "python/hooks.h"
#include "base/clock.h"
#include "base/file_lock.h"

uint32_t fork_generation;
static struct list_link all_segments = {&all_segments, &all_segments};

/* ---- Fork ---- */

/* Set while this thread forks with copies made. */
static _Thread_local bool ready_to_fork;

static void before_fork(void) {
    /* Without the interpreter lock the lists may change; and a child forked without the lock cannot
     * run Python. */
    ready_to_fork = PyGILState_Check() != 0;
    for (struct list_link *l = all_segments.next; ready_to_fork && l != &all_segments;
         l = l->next) {
        SegmentObject *s = LIST_ENTRY(l, SegmentObject, of_all);
        if (s->c.fd >= 0) {
            (void)py_copies_make(&s->read_at_fork, &s->c, &s->views, false);
            (void)py_copies_make(&s->written_at_fork, &s->c, &s->views, true);
        }
    }
}

static void after_fork_in_parent(void) {
    for (struct list_link *l = all_segments.next; ready_to_fork && l != &all_segments;
         l = l->next) {
        SegmentObject *s = LIST_ENTRY(l, SegmentObject, of_all);
        segment_copies_drop(&s->read_at_fork);
        segment_copies_drop(&s->written_at_fork);
    }
    ready_to_fork = false;
}

/* In the child: a copied file description keeps its locks, and with them the parent's proof of
 * life, even after the parent's death. The child therefore closes the inherited descriptor. */
static void after_fork_in_child(void) {
    fork_generation++;
    for (struct list_link *l = all_segments.next; l != &all_segments; l = l->next) {
        SegmentObject *s = LIST_ENTRY(l, SegmentObject, of_all);
        if (s->c.fd >= 0) {
            segment_isolate(&s->c);
            if (ready_to_fork) {
                (void)py_copies_replace(&s->read_at_fork, &s->c, false);
                (void)py_copies_replace(&s->written_at_fork, &s->c, true);
            }
            close(s->c.fd);
            s->c.fd = -1;
        }
    }
    ready_to_fork = false;
}

bool py_segment_init_fork(void) {
    return pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
}

bool py_handle_usable(const char *noun, PyObject *name, const char *what, uint32_t generation,
                      int pid, bool closed) {
    if (generation != fork_generation) {
        return py_refuse(
            hooks.closed_error,
            "%s '%U': this %s was made in process %d, before a fork; make a new one in "
            "this process",
            noun, name, what, pid);
    }
    if (closed) {
        return py_refuse(hooks.closed_error, "%s '%U': this %s is closed; make a new one", noun,
                         name, what);
    }
    return true;
}

bool py_segment_usable(SegmentObject *self, const char *what) {
    return py_handle_usable("bus", self->name, what, self->generation, self->pid,
                            self->handle_closed);
}

void py_segment_add_view(SegmentObject *self, struct view *view) {
    list_insert_before(&self->views, &view->link);
}

/* Copy the records under writable, or under read-only, views and put the copies in place. */
static bool detach_views(SegmentObject *self, bool writable) {
    struct segment_copies copies;
    return py_copies_make(&copies, &self->c, &self->views, writable) &&
           py_copies_replace(&copies, &self->c, writable);
}

void py_segment_release_handle(SegmentObject *self) {
    if (self->handle_closed) {
        return;
    }
    self->handle_closed = true;
    bool own = self->generation == fork_generation;
    bool written = own && detach_views(self, true);
    bool read = own && detach_views(self, false);
    if (own && !read) {
        py_copies_lock_instead(&self->c, &self->views);
    }
    for (struct list_link *l = self->views.next; l != &self->views; l = l->next) {
        struct view *view = LIST_ENTRY(l, struct view, link);
        view->handle_closed(view, view->writable ? written : read);
    }
    /* Without memory for copies the locks keep the space until the last view is gone. */
    if (written && read) {
        close(self->c.fd);
        self->c.fd = -1;
    }
}

static void py_segment_dealloc(SegmentObject *self) {
    list_unlink(&self->of_all);
    segment_unmap(&self->c);
    if (self->c.fd >= 0 && self->generation == fork_generation) {
        close(self->c.fd);
    }
    for (uint32_t number = 0; number < SHMBUS_MAX_SPLITS; number++) {
        Py_CLEAR(self->split_labels[number]);
    }
    Py_XDECREF(self->name);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static SegmentObject *py_segment_alloc(PyTypeObject *type, PyObject *name) {
    SegmentObject *self = (SegmentObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->c.fd = -1;
        self->name = Py_NewRef(name);
        self->generation = fork_generation;
        self->pid = (int)getpid();
        list_init(&self->views);
        list_insert_before(&all_segments, &self->of_all);
    }
    return self;
}

static void raise_status(SegmentObject *self, enum shared_status status, uint64_t wanted) {
    static const char *const names[] = {"ok",          "system",      "space",
                                        "memory",      "unfinished",  "magic",       "version",
                                        "hash",        "geometry",    "truncated"};
    if (status == SHARED_SYSTEM_ERROR) {
        py_raise_system("bus", self->name);
    } else if (status == SHARED_NO_SPACE) {
        py_raise_hook(hooks.space_error, Py_BuildValue("(OK)", self->name, wanted));
    } else if (status == SHARED_NO_MEMORY) {
        py_raise_hook(hooks.memory_error,
                      Py_BuildValue("(OK)", self->name, wanted > 0 ? wanted : self->c.bytes));
    } else {
        unsigned long long found =
            status == SHARED_BAD_HASH    ? self->c.found_hash
            : status == SHARED_TRUNCATED ? self->c.found_bytes
                                          : self->c.found_version;
        unsigned long long expected =
            status == SHARED_BAD_HASH ? SHMBUS_LAYOUT_HASH : SHMBUS_LAYOUT_VERSION;
        py_raise_hook(hooks.layout_error,
                      Py_BuildValue("(OsKK)", self->name, names[status], found, expected));
    }
}

static PyObject *opened(SegmentObject *self, enum shared_status status, uint64_t bytes) {
    if (status == SHARED_OK) {
        return (PyObject *)self;
    }
    raise_status(self, status, bytes);
    self->c.fd = -1; /* the caller's again */
    Py_DECREF(self);
    return NULL;
}

bool py_segment_map_views(SegmentObject *self) {
    enum shared_status status = segment_map_views(&self->c);
    if (status != SHARED_OK) {
        raise_status(self, status, 0);
    }
    return status == SHARED_OK;
}

/* create(fd, name, capacity, max_producers, extent_bytes, request_bytes, max_lead, max_versions,
 * declared): takes over the descriptor on success. request_bytes 0 chooses a default; max_lead 0
 * and max_versions 0 mean no bound, and max_versions is the bound in versions plus one. */
static PyObject *py_segment_create(PyTypeObject *type, PyObject *args) {
    int fd;
    PyObject *name;
    unsigned long long capacity, extent_bytes, request_bytes = 0;
    unsigned int max_producers, max_lead = 0, max_versions = 0;
    const char *declared = NULL;
    Py_ssize_t declared_bytes = 0;
    struct segment_geometry plan;
    if (!PyArg_ParseTuple(args, "iUKIK|KIIy#", &fd, &name, &capacity, &max_producers, &extent_bytes,
                          &request_bytes, &max_lead, &max_versions, &declared, &declared_bytes)) {
        return NULL;
    }
    if (declared_bytes > (Py_ssize_t)SHMBUS_DECLARED_BYTES ||
        !segment_plan(capacity, max_producers, extent_bytes, &plan) ||
        (request_bytes > 0 && !segment_plan_requests(&plan, request_bytes))) {
        return PyErr_Format(
            PyExc_ValueError,
            "bus '%U': no segment can be laid out for capacity=%llu bytes, "
            "max_producers=%u (1 to %u), extent_bytes=%llu (a multiple of %u, at most the "
            "capacity)",
            name, capacity, max_producers, SHMBUS_MAX_PRODUCERS, extent_bytes, SHMBUS_PAGE);
    }
    plan.max_lead = max_lead;
    plan.max_lead_versions = max_versions;
    plan.declared = declared;
    plan.declared_bytes = (uint32_t)declared_bytes;
    SegmentObject *self = py_segment_alloc(type, name);
    if (self == NULL) {
        return NULL;
    }
    enum shared_status status;
    Py_BEGIN_ALLOW_THREADS
    status = segment_create(&self->c, fd, &plan);
    Py_END_ALLOW_THREADS
    return opened(self, status, plan.segment_bytes);
}

static PyObject *py_segment_open(PyTypeObject *type, PyObject *args) {
    int fd, read_only = 0;
    PyObject *name;
    if (!PyArg_ParseTuple(args, "iU|p", &fd, &name, &read_only)) {
        return NULL;
    }
    SegmentObject *self = py_segment_alloc(type, name);
    if (self == NULL) {
        return NULL;
    }
    enum shared_status status;
    Py_BEGIN_ALLOW_THREADS
    status = segment_open(&self->c, fd, read_only != 0);
    Py_END_ALLOW_THREADS
    return opened(self, status, 0);
}

/* A table's place in the file, from its pointer and the pointer behind it. */
#define PLACE(name, from, behind)                                              \
    name, U64((const uint8_t *)(from) - (const uint8_t *)c->header),           \
        U64((const uint8_t *)(behind) - (const uint8_t *)(from))

/* survey(header, file_bytes, name) -> {table: (offset, bytes)} of a file; raises as open does. */
static PyObject *py_segment_survey(PyTypeObject *type, PyObject *args) {
    Py_buffer header;
    unsigned long long file_bytes;
    PyObject *name, *places = NULL;
    if (!PyArg_ParseTuple(args, "y*KU", &header, &file_bytes, &name)) {
        return NULL;
    }
    NEVER(header.len < (Py_ssize_t)SHMBUS_HEADER_BYTES, NULL);
    SegmentObject *self = py_segment_alloc(type, name);
    if (self != NULL) {
        enum shared_status status = segment_survey(&self->c, header.buf, file_bytes);
        const struct segment *c = &self->c;
        const struct request_parts *lane = &c->requests;
        if (status != SHARED_OK) {
            raise_status(self, status, 0);
        } else {
            places = Py_BuildValue(
                "{s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)s(KK)}",
                PLACE("slots", c->slots, c->extents), PLACE("extents", c->extents, c->intent_log),
                PLACE("intents", c->intent_log, c->retries),
                PLACE("retries", c->retries, c->splits), PLACE("splits", c->splits, c->cancelled),
                PLACE("declared", c->declared, c->figures), PLACE("figures", c->figures, c->waits),
                PLACE("waits", c->waits, c->lead), PLACE("lead", c->lead, c->lead->rows),
                PLACE("lead_rows", c->lead->rows, c->relay),
                PLACE("relay", c->relay, c->relay_entries),
                PLACE("relay_entries", c->relay_entries, c->relay_entries + c->relay_entry_count),
                PLACE("lane", lane->lane, lane->rows), PLACE("rows", lane->rows, lane->order),
                PLACE("cells", lane->cells, lane->block_bits),
                PLACE("units", lane->units, c->data));
        }
        Py_DECREF(self);
    }
    PyBuffer_Release(&header);
    return places;
}

static PyObject *py_segment_close(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    py_segment_release_handle(self);
    Py_RETURN_NONE;
}

/* [slot of the holder]: by extent; -1 for a free extent, max_producers for the collector. */
static PyObject *py_segment_holders(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *result = PyList_New(self->c.extent_count);
    for (uint32_t i = 0; i < self->c.extent_count && result != NULL; i++) {
        long slot = (long)link_low(RELAXED(self->c.extents[i].word)) - 1;
        py_list_set(&result, i, PyLong_FromLong(slot));
    }
    return result;
}

/* [(slot, state, producer_id, pid, label, committed, aborted)] of slots used so far. */
static PyObject *py_segment_producers(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *result = PyList_New(0);
    for (uint32_t i = 0; i < self->c.max_producers && result != NULL; i++) {
        struct producer_slot *slot = &self->c.slots[i];
        unsigned long long producer_id = ACQUIRE(slot->producer_id);
        if (producer_id == 0) {
            continue;
        }
        py_list_add(&result,
                    Py_BuildValue("(IIKINKK)", i, ACQUIRE(slot->state), producer_id,
                                  RELAXED(slot->pid), FIELD_TEXT(slot->label),
                                  U64(ACQUIRE(slot->committed)), U64(ACQUIRE(slot->aborted))));
    }
    return result;
}

/* tally() -> (attached, committed, aborted): current producers, and the sums over the slots'
 * counters. */
static PyObject *py_segment_tally(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    uint32_t attached = 0;
    uint64_t committed = 0, aborted = 0;
    for (uint32_t i = 0; i < self->c.max_producers; i++) {
        const struct producer_slot *slot = &self->c.slots[i];
        attached += RELAXED(slot->state) == SHMBUS_SLOT_ACTIVE;
        committed += RELAXED(slot->committed);
        aborted += RELAXED(slot->aborted);
    }
    return Py_BuildValue("(IKK)", attached, U64(committed), U64(aborted));
}

/* tells_stall(trainer, period_s) -> bool: True if this process must report a stall, on behalf of
 * every waiting trainer or producer; always True for a read-only handle. */
static PyObject *py_segment_tells_stall(SegmentObject *self, PyObject *args) {
    int trainer;
    double period_s;
    if (!PyArg_ParseTuple(args, "pd", &trainer, &period_s)) {
        return NULL;
    }
    if (self->c.read_only) {
        Py_RETURN_TRUE;
    }
    _Atomic uint64_t *told_ns = &self->c.header->stall_told_ns[trainer];
    uint64_t now = clock_monotonic_ns();
    uint64_t told = RELAXED(*told_ns);
    /* A reporter comes back after its period, plus or minus the time of a call. */
    bool recent = told <= now && (double)(now - told) < period_s * 0.9e9;
    return PyBool_FromLong(!recent && EXCHANGE(*told_ns, told, now, memory_order_relaxed));
}

/* True if a process currently holds the collector's lock. */
static PyObject *py_segment_has_collector(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_segment_usable(self, "handle")) {
        return NULL;
    }
    return PyBool_FromLong(file_lock_probe(self->c.fd, SHMBUS_LOCK_COLLECTOR) ==
                           LOCK_HELD_ELSEWHERE);
}

/* {"pid", "label", "leased_groups", ...}: the collector's latest notes. */
static PyObject *py_segment_collector(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    struct bus_header *h = self->c.header;
    return Py_BuildValue(
        "{s:I,s:N,s:I,s:K,s:K,s:K,s:K}", "pid", RELAXED(h->collector_pid), "label",
        FIELD_TEXT(h->collector_label), "leased_groups", RELAXED(h->collector_leased_groups),
        "leased_records", U64(RELAXED(h->collector_leased_records)), "stashed_groups",
        U64(RELAXED(h->collector_stashed_groups)), "stashed_records",
        U64(RELAXED(h->collector_stashed_records)), "seen_ns", U64(RELAXED(h->collector_seen_ns)));
}

/* pause(reason, policy_version): let producers wait from now on, like on a full bus. */
static PyObject *py_segment_pause(SegmentObject *self, PyObject *args) {
    const char *reason;
    Py_ssize_t length;
    long long version;
    if (!PyArg_ParseTuple(args, "s#L", &reason, &length, &version) ||
        !py_segment_usable(self, "handle")) {
        return NULL;
    }
    NEVER(self->c.read_only || length >= (Py_ssize_t)SHMBUS_PAUSE_REASON_BYTES, NULL);
    struct bus_header *h = self->c.header;
    if (removal_happened(&self->c)) {
        py_segment_raise_removed(self);
        return NULL;
    }
    memset(h->pause_reason, 0, sizeof h->pause_reason);
    memcpy(h->pause_reason, reason, (size_t)length);
    SET_RELAXED(h->pause_policy_version, version);
    SET_RELAXED(h->pause_unix_ns, clock_realtime_ns());
    uint32_t runs = SHMBUS_RUNS;
    EXCHANGE(h->paused, runs, SHMBUS_PAUSED, memory_order_release);
    Py_RETURN_NONE;
}

static PyObject *py_segment_resume(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_segment_usable(self, "handle")) {
        return NULL;
    }
    if (!self->c.read_only) {
        uint32_t paused = SHMBUS_PAUSED;
        EXCHANGE(self->c.header->paused, paused, SHMBUS_RUNS, memory_order_release);
        bell_ring_all(&self->c.header->space_bell);
        bell_ring(&self->c.requests.lane->work, BELL_ALL);
    }
    Py_RETURN_NONE;
}

int py_take_segment(PyObject *object, void *segment) {
    if (!PyObject_TypeCheck(object, &SegmentType)) {
        PyErr_SetString(PyExc_TypeError, "expected a Segment");
        return 0;
    }
    *(SegmentObject **)segment = (SegmentObject *)object;
    return py_segment_usable((SegmentObject *)object, "handle");
}

static bool is_writable(const SegmentObject *self) {
    return !self->c.read_only ||
           py_refuse(PyExc_TypeError, "bus '%U' is mapped read-only here", self->name);
}

int py_take_writable(PyObject *object, void *segment) {
    return py_take_segment(object, segment) && is_writable((SegmentObject *)object);
}

int py_take_round(PyObject *object, void *to) {
    int64_t *round = to;
    *round = object == Py_None ? SHMBUS_NO_ROUND : PyLong_AsLongLong(object);
    return *round != -1 || !PyErr_Occurred();
}

PyObject *py_round(int64_t round) {
    return round == SHMBUS_NO_ROUND ? Py_NewRef(Py_None) : PyLong_FromLongLong(round);
}

void py_segment_raise_removed(SegmentObject *self) {
    uint64_t removed_ns = RELAXED(self->c.header->pause_unix_ns);
    py_raise_hook(hooks.removed_error, Py_BuildValue("(OK)", self, U64(removed_ns)));
}

/* note_removal() -> bool: True if the bus lost its name; its processes are then told. */
static PyObject *py_segment_note_removal(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    return py_segment_usable(self, "handle") ? PyBool_FromLong(removal_note(&self->c)) : NULL;
}

/* require_name(): raise BusRemovedError if the bus lost its name. A system call. */
static PyObject *py_segment_require_name(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    if (removal_note(&self->c)) {
        py_segment_raise_removed(self);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* (reason, policy_version, unix_ns) of the pause, or None. */
static PyObject *py_segment_paused(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    struct bus_header *h = self->c.header;
    if (!py_segment_usable(self, "handle")) {
        return NULL;
    }
    if (ACQUIRE(h->paused) != SHMBUS_PAUSED) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(NLK)", FIELD_TEXT(h->pause_reason),
                         (long long)RELAXED(h->pause_policy_version),
                         U64(RELAXED(h->pause_unix_ns)));
}

/* locks_held(kind) -> [(first, count)]: extents under other processes' view locks (kind 0), or
 * under one client's lease locks (kind 1 + client). */
static PyObject *py_segment_locks_held(SegmentObject *self, PyObject *args) {
    unsigned int kind;
    if (!PyArg_ParseTuple(args, "I", &kind) || !py_segment_usable(self, "handle")) {
        return NULL;
    }
    return py_locks_held(&self->c, kind);
}

static PyObject *py_segment_released(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *result = PyTuple_New(SHMBUS_REASONS);
    for (int i = 0; i < SHMBUS_REASONS && result != NULL; i++) {
        py_tuple_set(&result, i, PyLong_FromUnsignedLongLong(RELAXED(self->c.header->released[i])));
    }
    return result;
}

static PyObject *py_segment_free_extents(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLong(extent_count_free(&self->c));
}

static PyObject *py_segment_space_wanted(SegmentObject *self, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong((RELAXED(self->c.header->space_bell.wanted) & SPACE_FREED) != 0);
}

static PyObject *py_segment_get_policy_version(SegmentObject *self, void *Py_UNUSED(ignored)) {
    if (!py_segment_usable(self, "handle")) {
        return NULL;
    }
    return PyLong_FromLongLong(RELAXED(self->c.header->policy_version));
}

static int py_segment_set_policy_version(SegmentObject *self, PyObject *value,
                                         void *Py_UNUSED(ignored)) {
    if (!py_is_given(value, "policy_version") || !is_writable(self)) {
        return -1;
    }
    long long version = PyLong_AsLongLong(value);
    if (version == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (version < 0) {
        PyErr_Format(PyExc_ValueError, "policy_version: expected 0 or more, got %lld", version);
        return -1;
    }
    SET_RELAXED(self->c.header->policy_version, version);
    return 0;
}

static PyObject *py_segment_get_capacity(SegmentObject *self, void *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLongLong(self->c.extent_bytes * self->c.extent_count);
}

static PyObject *py_segment_get_attach_epoch(SegmentObject *self, void *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLong(ACQUIRE(self->c.header->attach_epoch));
}

static PyObject *py_segment_get_removed(SegmentObject *self, void *Py_UNUSED(ignored)) {
    return PyBool_FromLong(removal_happened(&self->c));
}

static PyObject *py_segment_get_closed(SegmentObject *self, void *Py_UNUSED(ignored)) {
    return PyBool_FromLong(self->handle_closed || self->generation != fork_generation);
}

static PyMethodDef segment_methods[] = {
    METHOD("create", py_segment_create, METH_VARARGS | METH_CLASS, NULL),
    METHOD("open", py_segment_open, METH_VARARGS | METH_CLASS, NULL),
    METHOD("survey", py_segment_survey, METH_VARARGS | METH_CLASS, NULL),
    METHOD("close", py_segment_close, METH_NOARGS, NULL),
    METHOD("holders", py_segment_holders, METH_NOARGS, NULL),
    METHOD("producers", py_segment_producers, METH_NOARGS, NULL),
    METHOD("tally", py_segment_tally, METH_NOARGS, NULL),
    METHOD("tells_stall", py_segment_tells_stall, METH_VARARGS, NULL),
    METHOD("has_collector", py_segment_has_collector, METH_NOARGS, NULL),
    METHOD("collector", py_segment_collector, METH_NOARGS, NULL),
    METHOD("pause", py_segment_pause, METH_VARARGS, NULL),
    METHOD("resume", py_segment_resume, METH_NOARGS, NULL),
    METHOD("paused", py_segment_paused, METH_NOARGS, NULL),
    METHOD("note_removal", py_segment_note_removal, METH_NOARGS, NULL),
    METHOD("require_name", py_segment_require_name, METH_NOARGS, NULL),
    METHOD("locks_held", py_segment_locks_held, METH_VARARGS, NULL),
    METHOD("released", py_segment_released, METH_NOARGS, NULL),
    METHOD("free_extents", py_segment_free_extents, METH_NOARGS, NULL),
    METHOD("space_wanted", py_segment_space_wanted, METH_NOARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef segment_getset[] = {
    {"policy_version", (getter)py_segment_get_policy_version, (setter)py_segment_set_policy_version,
     NULL, NULL},
    {"capacity", (getter)py_segment_get_capacity, NULL, NULL, NULL},
    {"attach_epoch", (getter)py_segment_get_attach_epoch, NULL, NULL, NULL},
    {"removed", (getter)py_segment_get_removed, NULL, NULL, NULL},
    {"closed", (getter)py_segment_get_closed, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef segment_members[] = {
    {"name", T_OBJECT_EX, offsetof(SegmentObject, name), READONLY, NULL},
    {"extent_bytes", T_ULONGLONG, offsetof(SegmentObject, c.extent_bytes), READONLY, NULL},
    {"extent_count", T_UINT, offsetof(SegmentObject, c.extent_count), READONLY, NULL},
    {"max_producers", T_UINT, offsetof(SegmentObject, c.max_producers), READONLY, NULL},
    {"record_limit", T_ULONGLONG, offsetof(SegmentObject, c.record_limit), READONLY, NULL},
    {"created_unix_ns", T_ULONGLONG, offsetof(SegmentObject, c.created_unix_ns), READONLY, NULL},
    {"identity", T_STRING_INPLACE, offsetof(SegmentObject, c.identity), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject SegmentType = {
    TYPE_BASICS("Segment", SegmentObject, py_segment_dealloc, 0),
    .tp_methods = segment_methods,
    .tp_getset = segment_getset,
    .tp_members = segment_members,
};
