/* Take: from the ring to a list of groups under lease, in one call.
 *
 * Intake reads the ring and sleeps until a decision is due. Decisions and periodic work belong to
 * Python's `on_due`.
 *
 * Invariants:
 * - Everything but sleep happens under the lock, including `on_due`. No thread sleeps with the
 *   lock.
 * - An exception comes before a lease, or gives the lease back: otherwise the lease would lack an
 *   owner.
 * - A group is under lease in its table before its object is made.
 * - After a wake-up, deliver first; run maintenance on the next pass. */
#include "python/read/read.h"

#include "base/clock.h"
#include "public_docs.h"
#include "python/hooks.h"
#include "ring/observe.h"

/* Minimum wait: work due earlier may as well run at its end. */
#define SHORTEST_WAIT_S 1e-4
/* Record interval below which the reader stays awake. Woken per record, a reader runs on the waking
 * producer's processor and delays the producer: a 1 MB record, in the ring after 60 us, took 77 us.
 * After as long without a look, a reader counts as asleep. */
#define STAYS_AWAKE_NS UINT64_C(100000)

struct take_request {
    PyObject *consumer;
    Py_ssize_t groups;
    double timeout_s; /* infinite for ever */
    uint32_t split;
};

/* TAKE_MORE: a second look may find records at once; TAKE_FAILED with an exception. */
enum take_state { TAKE_FAILED = -1, TAKE_IDLE = 0, TAKE_MORE = 1 };

typedef struct {
    PyObject_HEAD
    ReaderObject *reader;
    GroupTableObject *table;
    RecursiveLockObject *lock;
    PyTypeObject *kind; /* of groups: a subtype of GroupBase */
    PyObject *on_due;   /* on_due(intake, left, enough, now_s) -> True if more may follow */
    PyObject *lease;    /* lease(groups, split) -> list of entries; NULL to lease ready entries */
    PyObject *left;     /* list: samples read but neither in the table nor ready */
    struct watch watch;     /* over a wait */
    double group_timeout_s; /* age limit of the oldest incomplete group; or infinite */
    double due_s;           /* next on_due if the caller is awake; CLOCK_MONOTONIC */
    double wake_s;          /* likewise, waking the caller if necessary */
    Py_ssize_t portion;     /* records between two checks of the ready list */
    Py_ssize_t portions;    /* maximum per look, to end a flood */
    char delegate_all;      /* on_due reads every portion itself */
} IntakeObject;

static double seconds(uint64_t ns) {
    return (double)ns * 1e-9;
}

static enum take_state run_due(IntakeObject *self, const struct take_request *request,
                               double now_s) {
    bool enough = self->table->lists.ready[request->split].groups >= (uint64_t)request->groups;
    /* A separate list, because a signal handler may also take meanwhile. */
    PyObject *fresh = PyList_New(0);
    if (fresh == NULL) {
        return TAKE_FAILED;
    }
    PyObject *left = self->left;
    self->left = fresh;
    PyObject *arguments = Py_BuildValue("(ONOd)", self, left, enough ? Py_True : Py_False, now_s);
    PyObject *said = arguments == NULL ? NULL : py_call_uninterrupted(self->on_due, arguments);
    Py_XDECREF(arguments);
    int more = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    if (more < 0) {
        py_reader_note_failure(self->reader);
        self->due_s = 0; /* to retry the remaining work */
        return TAKE_FAILED;
    }
    return more > 0 ? TAKE_MORE : TAKE_IDLE;
}

/* Deadline of the oldest incomplete group, or infinity. */
static double group_deadline_s(IntakeObject *self) {
    if (isinf(self->group_timeout_s)) {
        return INFINITY;
    }
    const struct group_entry *entry = group_table_oldest(&self->table->c);
    return entry == NULL ? INFINITY : entry->born_s + self->group_timeout_s;
}

/* Move a portion of the ring into the table. */
static enum take_state read_portion(IntakeObject *self, const struct take_request *request,
                                    double now_s) {
    Py_ssize_t count =
        py_reader_poll_records(self->reader, self->table, self->portion, now_s, self->left);
    if (count < 0 ||
        (PyList_GET_SIZE(self->left) > 0 && run_due(self, request, now_s) == TAKE_FAILED)) {
        return TAKE_FAILED;
    }
    return count < self->portion ? TAKE_IDLE : TAKE_MORE;
}

/* Move records from the ring into the table until enough groups are ready. */
static enum take_state pump(IntakeObject *self, const struct take_request *request,
                            double now_s) {
    for (Py_ssize_t i = 0; i < self->portions; i++) {
        if (self->table->lists.ready[request->split].groups >= (uint64_t)request->groups) {
            return TAKE_MORE;
        }
        enum take_state state = self->delegate_all ? run_due(self, request, now_s)
                                                   : read_portion(self, request, now_s);
        if (state != TAKE_MORE) {
            return state;
        }
    }
    return TAKE_MORE;
}

/* Give back undelivered leases, keeping their order. */
static void give_back_all(PyObject *list, Py_ssize_t groups, PyObject *consumer) {
    for (Py_ssize_t i = PyList_GET_SIZE(list) - 1; i >= 0; i--) {
        PyObject *item = PyList_GET_ITEM(list, i);
        py_group_entry_give_back(
            (GroupEntryObject *)(i < groups ? py_group_lease(item, consumer) : item));
    }
}

/* Make groups of leased entries, in place; on failure no lease, false with an exception. */
static bool make_groups(IntakeObject *self, PyObject *consumer, PyObject *list) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *entry = PyList_GET_ITEM(list, i);
        PyObject *group = py_group_new(self->kind, consumer, entry);
        if (group == NULL) {
            give_back_all(list, i, consumer);
            return false;
        }
        PyList_SET_ITEM(list, i, group);
        Py_DECREF(entry);
    }
    return true;
}

static PyObject *call_lease(IntakeObject *self, const struct take_request *request) {
    PyObject *arguments = Py_BuildValue("(nI)", request->groups, request->split);
    PyObject *list =
        arguments == NULL ? NULL : py_call_uninterrupted(self->lease, arguments);
    Py_XDECREF(arguments);
    if (list == NULL) {
        py_reader_note_failure(self->reader);
    }
    return list;
}

/* A list of groups under lease; NULL with an exception. */
static PyObject *lease(IntakeObject *self, const struct take_request *request, uint64_t now_ns) {
    if (self->table->lists.ready[request->split].groups == 0) {
        return PyList_New(0);
    }
    const bool plain = self->lease == NULL || self->lease == Py_None;
    PyObject *list = plain ? py_group_lists_lease_ready(&self->table->lists, request->split,
                                                        request->groups, now_ns)
                           : call_lease(self, request);
    if (list != NULL && plain && request->split == SHMBUS_SPLIT_TRAIN) {
        py_delivery_count(self->reader->segment, list);
    }
    if (list != NULL && !make_groups(self, request->consumer, list)) {
        Py_CLEAR(list);
    }
    return list;
}

/* Look at the ring once, under the lock. */
static PyObject *look(IntakeObject *self, const struct take_request *request, bool just_woken,
                      enum take_state *state) {
    /* A second thread may have closed the reader before the lock was free. */
    if (!py_reader_can_read(self->reader)) {
        return NULL;
    }
    uint64_t delivered = self->reader->c.delivered;
    uint64_t now_ns = clock_monotonic_ns();
    double now_s = seconds(now_ns);
    bool due = !just_woken && (now_s >= self->due_s || now_s >= self->wake_s ||
                               now_s >= group_deadline_s(self));
    bool calls = due || self->delegate_all;
    *state = calls ? run_due(self, request, now_s) : TAKE_IDLE;
    if (*state == TAKE_MORE || (*state == TAKE_IDLE && !self->delegate_all)) {
        py_reader_note_seen(self->reader, now_ns);
        *state = pump(self, request, now_s);
    }
    PyObject *groups = *state == TAKE_FAILED ? NULL : lease(self, request, now_ns);
    if (groups != NULL &&
        (self->reader->c.delivered != delivered || PyList_GET_SIZE(groups) > 0)) {
        /* A producer may ask for the holders of space before the caller comes back. */
        py_reader_note_table(self->reader, self->table);
    }
    return groups;
}

static PyObject *locked_look(IntakeObject *self, const struct take_request *request,
                             bool just_woken, enum take_state *state) {
    if (!py_recursive_lock_acquire(self->lock)) {
        return NULL;
    }
    PyObject *groups = look(self, request, just_woken, state);
    py_recursive_lock_release(self->lock);
    return groups;
}

enum wait_end { ENDED_FAILED, ENDED_WOKEN, ENDED_DUE, ENDED_TIME_OVER };

/* Sleep until records arrive, on_due must run, or the time is over. */
static enum wait_end wait_for_more(IntakeObject *self, const struct take_request *request,
                                   double began_s, double *next_watch_s) {
    double now_s = seconds(clock_monotonic_ns());
    double waited_s = now_s - began_s;
    bool over = waited_s >= request->timeout_s;
    if ((over || waited_s >= *next_watch_s) &&
        !py_watch_call(&self->watch, waited_s, next_watch_s)) {
        return ENDED_FAILED;
    }
    /* A removed bus still delivers its ring's records, but waiting for more is pointless. */
    if (removal_happened(&self->reader->segment->c)) {
        py_segment_raise_removed(self->reader->segment);
        return ENDED_FAILED;
    }
    if (over) {
        return ENDED_TIME_OVER;
    }
    /* The watchdog's report may have closed the reader. */
    if (!py_reader_usable(self->reader)) {
        return ENDED_FAILED;
    }
    double left_s = fmin(fmin(request->timeout_s, *next_watch_s) - waited_s,
                         fmin(self->wake_s, group_deadline_s(self)) - now_s);
    struct segment *segment = &self->reader->segment->c;
    bool empty_handed = py_group_lists_leased_since(&self->table->lists) == 0;
    enum wait_result result =
        py_reader_wait_for_events(self->reader, fmax(SHORTEST_WAIT_S, left_s), STAYS_AWAKE_NS);
    if (empty_handed && result != WAIT_FAILED) {
        waits_add(segment, segment->max_producers, SHMBUS_WAIT_GROUPS,
                  (uint64_t)(fmax(0, seconds(clock_monotonic_ns()) - now_s) * 1e9));
    }
    return result == WAIT_FAILED ? ENDED_FAILED : result == WAIT_WOKEN ? ENDED_WOKEN : ENDED_DUE;
}

/* Return a list of groups, empty after the timeout; NULL with an exception. */
static PyObject *py_intake_take(PyObject *intake, const struct take_request *request) {
    IntakeObject *self = (IntakeObject *)intake;
    /* A poll lasts a few hundred nanoseconds, a good part of that for a clock read: skip the
     * clock. */
    double began_s = request->timeout_s == 0 ? 0.0 : seconds(clock_monotonic_ns());
    double next_watch_s = py_watch_first_s(&self->watch);
    bool just_woken = false;
    for (;;) {
        enum take_state state = TAKE_IDLE;
        PyObject *groups = locked_look(self, request, just_woken, &state);
        if (groups == NULL || PyList_GET_SIZE(groups) > 0 ||
            (state == TAKE_IDLE && request->timeout_s == 0)) {
            return groups;
        }
        Py_DECREF(groups);
        enum wait_end end = ENDED_DUE;
        if (state == TAKE_MORE) {
            /* Let other threads and signals run during a flood of incomplete groups. */
            Py_BEGIN_ALLOW_THREADS
            Py_END_ALLOW_THREADS
            end = Py_MakePendingCalls() == 0 ? ENDED_DUE : ENDED_FAILED;
        } else if (!just_woken) {
            end = wait_for_more(self, request, began_s, &next_watch_s);
        }
        if (end == ENDED_FAILED) {
            return NULL;
        }
        if (end == ENDED_TIME_OVER) {
            return PyList_New(0);
        }
        /* After a fruitless wake-up, run maintenance before the next sleep. */
        just_woken = end == ENDED_WOKEN;
    }
}

static int py_intake_init(IntakeObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"reader", "table",   "lock",     "kind",    "on_due",          "lease",
                            "watch",  "portion", "portions", "watch_s", "group_timeout_s", NULL};
    PyObject *reader, *table, *lock, *kind, *call, *lease_call, *watch;
    NEVER(self->reader != NULL, -1);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!$OOOnndd", names, &ReaderType, &reader,
                                     &GroupTableType, &table, &RecursiveLockType, &lock,
                                     &PyType_Type, &kind, &call, &lease_call, &watch,
                                     &self->portion, &self->portions, &self->watch.period_s,
                                     &self->group_timeout_s)) {
        return -1;
    }
    NEVER(!PyType_IsSubtype((PyTypeObject *)kind, &GroupBaseType), -1);
    self->left = PyList_New(0);
    if (self->left == NULL) {
        return -1;
    }
    self->reader = (ReaderObject *)Py_NewRef(reader);
    self->table = (GroupTableObject *)Py_NewRef(table);
    self->lock = (RecursiveLockObject *)Py_NewRef(lock);
    self->kind = (PyTypeObject *)Py_NewRef(kind);
    self->on_due = Py_NewRef(call);
    self->lease = lease_call == Py_None ? NULL : Py_NewRef(lease_call);
    self->watch.call = watch == Py_None ? NULL : Py_NewRef(watch);
    return 0;
}

/* A stall report may lead back to its Consumer. */
static int py_intake_traverse(IntakeObject *self, visitproc visit, void *arg) {
    Py_VISIT(self->kind);
    Py_VISIT(self->on_due);
    Py_VISIT(self->lease);
    Py_VISIT(self->watch.call);
    Py_VISIT(self->left);
    return 0;
}

static int py_intake_clear(IntakeObject *self) {
    Py_CLEAR(self->watch.call);
    return 0;
}

static void py_intake_dealloc(IntakeObject *self) {
    PyObject_GC_UnTrack(self);
    py_intake_clear(self);
    Py_XDECREF(self->reader);
    Py_XDECREF(self->table);
    Py_XDECREF(self->lock);
    Py_XDECREF(self->kind);
    Py_XDECREF(self->on_due);
    Py_XDECREF(self->lease);
    Py_XDECREF(self->left);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef intake_members[] = {
    {"due_s", T_DOUBLE, offsetof(IntakeObject, due_s), 0, NULL},
    {"wake_s", T_DOUBLE, offsetof(IntakeObject, wake_s), 0, NULL},
    {"delegate_all", T_BOOL, offsetof(IntakeObject, delegate_all), 0, NULL},
    {"lease", T_OBJECT, offsetof(IntakeObject, lease), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* The bus of an Intake, borrowed; NULL without an exception after close. */
static SegmentObject *py_intake_segment(PyObject *intake) {
    ReaderObject *reader = ((IntakeObject *)intake)->reader;
    return py_reader_is_open(reader) ? reader->segment : NULL;
}

PyTypeObject IntakeType = {
    TYPE_BASICS("Intake", IntakeObject, py_intake_dealloc, Py_TPFLAGS_HAVE_GC),
    .tp_traverse = (traverseproc)py_intake_traverse,
    .tp_clear = (inquiry)py_intake_clear,
    .tp_members = intake_members,
    .tp_init = (initproc)py_intake_init,
    .tp_new = PyType_GenericNew,
};

/* ---- ConsumerBase.take, called by users. Written in C because a polling consumer calls little
 * else, and a freshly woken consumer pays for every line of Python.
 *
 * Invariant: handles only numbers, labels and an Intake; the remaining calls go to the subclass's
 * `_take`. */
/* Defaults of take. */
#define DEFAULT_GROUPS 64
#define DEFAULT_TIMEOUT_S 0.1

typedef struct {
    PyObject_HEAD PyObject *intake; /* initially None */
    unsigned int split;             /* number of the default split */
} ConsumerObject;

static bool read_groups(PyObject *value, struct take_request *request) {
    if (!PyLong_CheckExact(value)) {
        return false;
    }
    int overflow;
    long groups = PyLong_AsLongAndOverflow(value, &overflow);
    request->groups = overflow > 0 ? PY_SSIZE_T_MAX : groups;
    return request->groups >= 1;
}

static bool read_timeout(PyObject *value, struct take_request *request) {
    if (PyFloat_CheckExact(value)) {
        request->timeout_s = PyFloat_AS_DOUBLE(value);
    } else if (PyLong_CheckExact(value)) {
        int overflow;
        long timeout_s = PyLong_AsLongAndOverflow(value, &overflow);
        request->timeout_s = overflow != 0 ? -1.0 : (double)timeout_s;
    } else {
        request->timeout_s = value == Py_None ? INFINITY : -1.0;
    }
    return request->timeout_s >= 0;
}

static bool read_split(PyObject *value, struct take_request *request, SegmentObject *segment) {
    if (value == Py_None) {
        return true;
    }
    request->split = py_split_check(value) ? py_split_number(segment, value) : SHMBUS_MAX_SPLITS;
    PyErr_Clear(); /* `_take` raises the error again */
    return request->split < SHMBUS_MAX_SPLITS;
}

/* Parse the call; false to leave the call to `_take`. */
static bool read_call(struct take_request *request, PyObject *const *args, Py_ssize_t count,
                      PyObject *kwnames, SegmentObject *segment) {
    if (count > 2 || (count > 0 && !read_groups(args[0], request)) ||
        (count > 1 && !read_timeout(args[1], request))) {
        return false;
    }
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        PyObject *value = args[count + i];
        /* Call keywords are interned. */
        if (!(name == py_word.timeout && count < 2 && read_timeout(value, request)) &&
            !(name == py_word.max_groups && count < 1 && read_groups(value, request)) &&
            !(name == py_word.split && read_split(value, request, segment))) {
            return false;
        }
    }
    return true;
}

static PyObject *py_consumer_take(ConsumerObject *self, PyObject *const *args, Py_ssize_t count,
                                  PyObject *kwnames) {
    struct take_request request = {(PyObject *)self, DEFAULT_GROUPS, DEFAULT_TIMEOUT_S,
                                   self->split};
    SegmentObject *segment = self->intake != NULL && Py_IS_TYPE(self->intake, &IntakeType)
                                 ? py_intake_segment(self->intake)
                                 : NULL;
    if (segment != NULL && read_call(&request, args, count, kwnames, segment)) {
        PyObject *intake = Py_NewRef(self->intake);
        PyObject *groups = py_intake_take(intake, &request);
        Py_DECREF(intake);
        return groups;
    }
    PyObject *method = PyObject_GetAttr((PyObject *)self, py_word._take);
    PyObject *groups =
        method == NULL ? NULL : PyObject_Vectorcall(method, args, (size_t)count, kwnames);
    Py_XDECREF(method);
    return groups;
}

static int py_consumer_traverse(ConsumerObject *self, visitproc visit, void *arg) {
    Py_VISIT(self->intake);
    return 0;
}

static int py_consumer_clear(ConsumerObject *self) {
    Py_CLEAR(self->intake);
    return 0;
}

static void py_consumer_dealloc(ConsumerObject *self) {
    PyObject_GC_UnTrack(self);
    py_consumer_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef consumer_methods[] = {
    METHOD("take", py_consumer_take, METH_FASTCALL | METH_KEYWORDS, DOC_ConsumerBase_take),
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef consumer_members[] = {
    {"_intake", T_OBJECT, offsetof(ConsumerObject, intake), 0, NULL},
    {"_split", T_UINT, offsetof(ConsumerObject, split), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ConsumerBaseType = {
    TYPE_BASICS("ConsumerBase", ConsumerObject, py_consumer_dealloc,
                Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC),
    .tp_traverse = (traverseproc)py_consumer_traverse,
    .tp_clear = (inquiry)py_consumer_clear,
    .tp_doc = "``take``; what it does not know it leaves to ``_take`` of the subclass.",
    .tp_methods = consumer_methods,
    .tp_members = consumer_members,
    .tp_new = PyType_GenericNew,
};
