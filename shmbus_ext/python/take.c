/* Intake: from the ring to a lease in one call, for as long as nothing comes up that only Python
 * decides. That, and what is due now and then, goes to `attend`.
 *
 * Invariants:
 * - All but sleeping happens under the guard, and `attend` too. Nobody sleeps with it.
 * - What raises comes before a lease: nobody would know of a group leased then.
 * - A row is under lease in its table before a group is made of it.
 * - Between a wake-up and the caller lies what there is to deliver, and nothing that can wait. */
#include "take.h"

#include <math.h>

#include "ring/clock.h"

/* A wait is never shorter: what is due in less may as well be due then. */
#define SHORTEST_WAIT_S 1e-4

enum { TIME_IS_OVER = 2 };

struct intake {
    PyObject_HEAD
    ReaderObject *reader;
    GroupTableObject *rows;
    RecursiveLockObject *guard;
    PyTypeObject *kind; /* of groups: made of GroupBase */
    PyObject *attend;   /* attend(intake, left, wanted, now_s) -> whether there may be more */
    PyObject *lease;    /* lease(wanted) -> list of rows; NULL where each that is ready will do */
    PyObject *watch;    /* watch(waited_s) every watch_s of a wait; or NULL */
    PyObject *left;     /* list: what came, and is neither in the table nor ready */
    double watch_s;
    double group_timeout_s; /* after which the oldest row is due; or infinite */
    double due_s;           /* when attend is to be called, at a look; CLOCK_MONOTONIC */
    double wake_s;          /* the same, if need be from sleep */
    Py_ssize_t portion;     /* records between two looks at what is ready */
    Py_ssize_t portions;    /* in one look at the most, so that a flood ends */
    char delegate_all;          /* each look is attend's: it reads the ring, too */
};

static double seconds(uint64_t ns) {
    return (double)ns * 1e-9;
}

/* 1 if there may be more at once, 0 if not, -1 with an exception. */
static int attend(IntakeObject *self, Py_ssize_t groups, double now_s) {
    /* A list of its own, since a signal's handler may take, too, while this goes on. */
    PyObject *fresh = PyList_New(0);
    if (fresh == NULL) {
        return -1;
    }
    PyObject *left = self->left;
    self->left = fresh;
    PyObject *said = PyObject_CallFunction(self->attend, "OOnd", self, left, groups, now_s);
    Py_DECREF(left);
    int more = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    if (more < 0) {
        /* What it has not come to is due at once. */
        self->due_s = 0;
    }
    return more;
}

/* When the oldest group's time is over, where any is. */
static double row_deadline_s(IntakeObject *self) {
    if (isinf(self->group_timeout_s)) {
        return INFINITY;
    }
    const struct group_entry *row = group_table_oldest(&self->rows->c);
    return row == NULL ? INFINITY : row->born_s + self->group_timeout_s;
}

/* Moves what the ring has into the table, until enough is ready: 1 if there may be more at once, 0
 * if not, -1 with an exception. */
static int pump(IntakeObject *self, Py_ssize_t groups, double now_s) {
    for (Py_ssize_t i = 0; i < self->portions; i++) {
        if (self->rows->ready.rows >= (uint64_t)groups) {
            return 1;
        }
        Py_ssize_t count =
            reader_poll_rows(self->reader, self->rows, self->portion, now_s, self->left);
        if (count < 0 ||
            (PyList_GET_SIZE(self->left) > 0 && attend(self, groups, now_s) < 0)) {
            return -1;
        }
        if (count < self->portion) {
            return 0;
        }
    }
    return 1;
}

/* A list of groups, each under lease; NULL with an exception. */
static PyObject *lease(IntakeObject *self, const struct wanted *wanted) {
    if (self->rows->ready.rows == 0) {
        return PyList_New(0);
    }
    PyObject *list = self->lease == NULL
                         ? rows_lease_ready(self->rows, wanted->groups)
                         : PyObject_CallFunction(self->lease, "n", wanted->groups);
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *row = PyList_GET_ITEM(list, i);
        PyObject *group = group_new(self->kind, wanted->consumer, row);
        if (group == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, i, group);
            Py_DECREF(row);
        }
    }
    return list;
}

/* One look at the ring, under the guard; `more` says whether another may bring more at once. */
static PyObject *look(IntakeObject *self, const struct wanted *wanted, bool just_woken,
                      int *more) {
    /* Another thread may have closed it before the guard was free. */
    if (!reader_usable(self->reader)) {
        return NULL;
    }
    uint64_t delivered = self->reader->c.delivered;
    uint64_t now_ns = clock_monotonic_ns();
    double now_s = seconds(now_ns);
    bool due = !just_woken && (now_s >= self->due_s || now_s >= self->wake_s ||
                               now_s >= row_deadline_s(self));
    *more = due || self->delegate_all ? attend(self, wanted->groups, now_s) : 0;
    if (*more >= 0 && !self->delegate_all) {
        reader_note_seen(self->reader, now_ns);
        *more = pump(self, wanted->groups, now_s);
    }
    PyObject *groups = *more < 0 ? NULL : lease(self, wanted);
    if (groups != NULL &&
        (self->reader->c.delivered != delivered || PyList_GET_SIZE(groups) > 0)) {
        /* The caller may not come back before a producer asks who holds the space. */
        reader_note_rows(self->reader, self->rows);
    }
    return groups;
}

static PyObject *guarded_look(IntakeObject *self, const struct wanted *wanted, bool just_woken,
                              int *more) {
    if (!recursive_lock_acquire(self->guard)) {
        return NULL;
    }
    PyObject *groups = look(self, wanted, just_woken, more);
    recursive_lock_release(self->guard);
    return groups;
}

static bool call_watch(IntakeObject *self, double waited_s, double *next_watch_s) {
    if (self->watch == NULL) {
        return true;
    }
    *next_watch_s = waited_s + self->watch_s;
    PyObject *result = PyObject_CallFunction(self->watch, "d", waited_s);
    Py_XDECREF(result);
    return result != NULL;
}

/* Sleeps until records come: 1; until something is due: 0; TIME_IS_OVER, or -1 with an exception. */
static int wait_for_more(IntakeObject *self, const struct wanted *wanted, double began_s,
                         double *next_watch_s) {
    double now_s = seconds(clock_monotonic_ns());
    double waited_s = now_s - began_s;
    bool over = waited_s >= wanted->timeout_s;
    if ((over || waited_s >= *next_watch_s) && !call_watch(self, waited_s, next_watch_s)) {
        return -1;
    }
    if (over) {
        return TIME_IS_OVER;
    }
    /* Whoever hears of a stall may close it. */
    if (!reader_usable(self->reader)) {
        return -1;
    }
    double left_s = fmin(fmin(wanted->timeout_s, *next_watch_s) - waited_s,
                         fmin(self->wake_s, row_deadline_s(self)) - now_s);
    return reader_wait_for_events(self->reader, fmax(SHORTEST_WAIT_S, left_s));
}

/* A flood of which nothing is complete stops neither other threads nor signals. */
static bool let_others_run(void) {
    Py_BEGIN_ALLOW_THREADS
    Py_END_ALLOW_THREADS
    return PyErr_CheckSignals() == 0;
}

PyObject *intake_take(IntakeObject *self, const struct wanted *wanted) {
    double began_s = seconds(clock_monotonic_ns());
    double next_watch_s = self->watch == NULL ? INFINITY : self->watch_s;
    bool just_woken = false;
    for (;;) {
        int more = 0;
        PyObject *groups = guarded_look(self, wanted, just_woken, &more);
        if (groups == NULL || PyList_GET_SIZE(groups) > 0 ||
            (more == 0 && wanted->timeout_s == 0)) {
            return groups;
        }
        Py_DECREF(groups);
        int came = 0;
        if (more > 0) {
            came = let_others_run() ? 0 : -1;
        } else if (!just_woken) {
            came = wait_for_more(self, wanted, began_s, &next_watch_s);
        }
        if (came < 0) {
            return NULL;
        }
        if (came == TIME_IS_OVER) {
            return PyList_New(0);
        }
        /* Where a wake-up brought nothing to deliver, what is due comes before the next sleep. */
        just_woken = came > 0;
    }
}

bool intake_is_open(const IntakeObject *self) {
    return reader_is_open(self->reader);
}

static int intake_init(IntakeObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"reader", "rows",    "guard",    "kind",    "attend",          "lease",
                            "watch",  "portion", "portions", "watch_s", "group_timeout_s", NULL};
    PyObject *reader, *rows, *guard, *kind, *call, *lease_call, *watch;
    if (self->reader != NULL) {
        PyErr_SetString(PyExc_TypeError, "this intake is initialised already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!$OOOnndd", names, &ReaderType, &reader,
                                     &GroupTableType, &rows, &RecursiveLockType, &guard, &PyType_Type, &kind,
                                     &call, &lease_call, &watch, &self->portion, &self->portions,
                                     &self->watch_s, &self->group_timeout_s)) {
        return -1;
    }
    if (!PyType_IsSubtype((PyTypeObject *)kind, &GroupBaseType)) {
        PyErr_SetString(PyExc_TypeError, "kind: expected a type that is made of GroupBase");
        return -1;
    }
    self->left = PyList_New(0);
    if (self->left == NULL) {
        return -1;
    }
    self->reader = (ReaderObject *)Py_NewRef(reader);
    self->rows = (GroupTableObject *)Py_NewRef(rows);
    self->guard = (RecursiveLockObject *)Py_NewRef(guard);
    self->kind = (PyTypeObject *)Py_NewRef(kind);
    self->attend = Py_NewRef(call);
    self->lease = lease_call == Py_None ? NULL : Py_NewRef(lease_call);
    self->watch = watch == Py_None ? NULL : Py_NewRef(watch);
    return 0;
}

/* A report of a stall may lead back to its Consumer. */
static int intake_traverse(IntakeObject *self, visitproc visit, void *arg) {
    Py_VISIT(self->kind);
    Py_VISIT(self->attend);
    Py_VISIT(self->lease);
    Py_VISIT(self->watch);
    Py_VISIT(self->left);
    return 0;
}

static int intake_clear(IntakeObject *self) {
    Py_CLEAR(self->watch);
    return 0;
}

static void intake_dealloc(IntakeObject *self) {
    PyObject_GC_UnTrack(self);
    intake_clear(self);
    Py_XDECREF(self->reader);
    Py_XDECREF(self->rows);
    Py_XDECREF(self->guard);
    Py_XDECREF(self->kind);
    Py_XDECREF(self->attend);
    Py_XDECREF(self->lease);
    Py_XDECREF(self->left);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef intake_members[] = {
    {"due_s", T_DOUBLE, offsetof(IntakeObject, due_s), 0, "When attend is called at a look."},
    {"wake_s", T_DOUBLE, offsetof(IntakeObject, wake_s), 0, "When a sleeper wakes for it."},
    {"delegate_all", T_BOOL, offsetof(IntakeObject, delegate_all), 0, "Whether each look is its."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject IntakeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Intake",
    .tp_basicsize = sizeof(IntakeObject),
    .tp_dealloc = (destructor)intake_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)intake_traverse,
    .tp_clear = (inquiry)intake_clear,
    .tp_members = intake_members,
    .tp_init = (initproc)intake_init,
    .tp_new = PyType_GenericNew,
};
