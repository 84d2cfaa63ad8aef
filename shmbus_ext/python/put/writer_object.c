/* Writer: the base of shmbus.Producer.
 *
 * Invariant: closing waits until every copy into the lane ended, then aborts open reservations and
 * batches, and only then gives up the lane. */
#define _GNU_SOURCE
#include "python/put/put.h"

#include <unistd.h>

#include "base/clock.h"
#include "public_docs.h"

/* Poll interval of a close, waiting for other threads' copies. */
#define CLOSE_POLL_US 50

static void pause_us(useconds_t us) {
    Py_BEGIN_ALLOW_THREADS
    usleep(us);
    Py_END_ALLOW_THREADS
}

/* Take a lane of the segment; false with an exception. */
static bool attach(struct writer *writer, SegmentObject *segment, const char *label) {
    enum writer_status status;
    Py_BEGIN_ALLOW_THREADS
    status = writer_attach_in_time(writer, &segment->c, label);
    Py_END_ALLOW_THREADS
    if (status == WRITER_SYSTEM_ERROR) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, segment->name);
    } else if (status != WRITER_OK) {
        py_raise_hook(hooks.busy_error, Py_BuildValue("(Os)", segment, "producer"));
    }
    return status == WRITER_OK;
}

/* Give up the lane and everything open in the lane. */
static void leave_bus(WriterObject *self) {
    py_writer_abort_batches(self);
    py_writer_abort_open(self);
    writer_close(&self->c);
    py_segment_release_handle(self->segment);
}

static int py_writer_init(WriterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", "label", "checksum", NULL};
    PyObject *segment;
    const char *label;
    int checksum = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!s|p", names, &SegmentType, &segment, &label,
                                     &checksum)) {
        return -1;
    }
    NEVER(self->segment != NULL, -1);
    self->segment = (SegmentObject *)Py_NewRef(segment);
    list_init(&self->reservations);
    if (!py_segment_usable(self->segment, "handle") ||
        !attach(&self->c, self->segment, label)) {
        return -1;
    }
    self->flags = checksum ? SHMBUS_FLAG_PAYLOAD_CRC : 0;
    strncpy(self->label, label, sizeof self->label - 1);
    self->committed_base = self->c.sequence;
    self->aborted_base = self->c.aborted;
    self->attached = true;
    return 0;
}

static bool take_call(struct put_arguments *arguments, PyObject *const *args, Py_ssize_t count,
                      PyObject *kwnames) {
    if (count > 1) {
        return py_refuse(
            PyExc_TypeError,
            "expected one positional argument, instance_id, got %zd; give the others by "
            "name",
            count);
    }
    if (count == 1 && !py_arguments_take_id(arguments, args[0])) {
        return false;
    }
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < named; i++) {
        if (!py_arguments_take(arguments, PyTuple_GET_ITEM(kwnames, i), args[count + i])) {
            return false;
        }
    }
    return true;
}

/* 1 for a put, 0 without a put for a lost claim; -1 with an exception. */
static int put_call(WriterObject *self, PyObject *const *args, Py_ssize_t count, PyObject *kwnames,
                    uint32_t flags, const struct request_claim *answers) {
    if (!py_writer_usable(self)) {
        return -1;
    }
    struct put_fields fields;
    struct put_arguments arguments;
    py_arguments_begin(&arguments, &fields);
    arguments.spec.flags = flags;
    if (answers != NULL) {
        arguments.answers = *answers;
    }
    bool done = take_call(&arguments, args, count, kwnames) &&
                py_arguments_finish(&arguments, &self->schemas, self->declared) &&
                py_writer_usable(self) && /* a second thread may close the writer during encoding */
                py_writer_put_one(self, &arguments);
    py_arguments_end(&arguments);
    if (!done) {
        return -1;
    }
    if (!arguments.unwanted) {
        py_writer_tell_reader(self);
    }
    return !arguments.unwanted;
}

static PyObject *py_writer_put(WriterObject *self, PyObject *const *args, Py_ssize_t count,
                               PyObject *kwnames) {
    return put_call(self, args, count, kwnames, 0, NULL) < 0 ? NULL : Py_NewRef(Py_None);
}

/* _answer(claim or None, flags, instance_id, ...): a put or, by `flags`, a failure report: put's
 * arguments, with the reason as meta, and no arrays; with FLAG_NO_SIZE, group_size is an arbitrary
 * number above the index. Ends the claim; False, without a put, if the claim was lost. */
static PyObject *py_writer_answer(WriterObject *self, PyObject *const *args, Py_ssize_t count,
                                  PyObject *kwnames) {
    struct request_claim claim;
    NEVER(count < 2, NULL);
    const bool claimed = args[0] != Py_None;
    int64_t flags;
    if (!py_writer_usable(self) || (claimed && !py_take_claim(self, args[0], &claim)) ||
        !py_take_integer(args[1], "flags", 0, SHMBUS_FLAG_FAILED | SHMBUS_FLAG_NO_SIZE, &flags)) {
        return NULL;
    }
    int done = put_call(self, args + 2, count - 2, kwnames, (uint32_t)flags,
                        claimed ? &claim : NULL);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* Announce the wish for space; then try again and, on failure, call await_space with the ticket. */
static PyObject *py_writer_want_space(WriterObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!py_writer_usable(self)) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(py_writer_want_room(self, self->segment));
}

/* await_space(ticket, timeout_s): sleep until the reader frees space after the ticket; takes no
 * space. */
static PyObject *py_writer_await_space(WriterObject *self, PyObject *args) {
    double timeout_s;
    unsigned int ticket;
    if (!PyArg_ParseTuple(args, "Id", &ticket, &timeout_s) || !py_writer_usable(self)) {
        return NULL;
    }
    int64_t slice_ns = timeout_s < 0 || timeout_s * 1e9 > (double)SPACE_SLICE_NS
                           ? SPACE_SLICE_NS
                           : (int64_t)(timeout_s * 1e9);
    SegmentObject *segment = (SegmentObject *)Py_NewRef((PyObject *)self->segment);
    py_writer_sleep(self, segment, BELL_ALL, ticket, slice_ns);
    Py_DECREF(segment);
    Py_RETURN_NONE;
}

static void py_writer_detach(WriterObject *self) {
    if (!self->attached) {
        return;
    }
    if (self->segment->generation != fork_generation || self->segment->handle_closed) {
        self->attached = false;
        return;
    }
    /* A second thread's copy ends in its own record: give up the space only afterwards. */
    self->closing = true;
    while (self->busy > 0) {
        pause_us(CLOSE_POLL_US);
    }
    if (self->attached) {
        self->attached = false;
        leave_bus(self);
    }
}

static PyObject *py_writer_close(WriterObject *self, PyObject *Py_UNUSED(ignored)) {
    py_writer_detach(self);
    Py_RETURN_NONE;
}

static void py_writer_dealloc(WriterObject *self) {
    if (self->segment != NULL) {
        py_writer_detach(self);
    }
    py_schema_cache_clear(&self->schemas);
    Py_XDECREF(self->declared);
    Py_XDECREF(self->watch.call);
    Py_XDECREF(self->segment);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* _watch_waits(call, seconds): run `call` every `seconds` seconds of a wait for space. */
static PyObject *py_writer_watch_waits(WriterObject *self, PyObject *args) {
    PyObject *call;
    double seconds;
    if (!PyArg_ParseTuple(args, "Od", &call, &seconds)) {
        return NULL;
    }
    Py_XSETREF(self->watch.call, Py_NewRef(call));
    self->watch.period_s = seconds;
    Py_RETURN_NONE;
}

/* _declare(schema or None): check later puts against the schema. */
static PyObject *py_writer_declare(WriterObject *self, PyObject *schema) {
    NEVER(schema != Py_None && !PyObject_TypeCheck(schema, &DeclaredSchemaType), NULL);
    Py_XSETREF(self->declared,
               schema == Py_None ? NULL : (DeclaredSchemaObject *)Py_NewRef(schema));
    Py_RETURN_NONE;
}

static PyObject *py_writer_counts(WriterObject *self, PyObject *Py_UNUSED(ignored)) {
    return Py_BuildValue("(KKKK)", U64(self->c.sequence - self->committed_base),
                         U64(self->c.aborted - self->aborted_base), U64(self->bytes),
                         U64(self->full_waits));
}

static PyObject *py_writer_get_closed(WriterObject *self, void *Py_UNUSED(ignored)) {
    return PyBool_FromLong(!self->attached || self->segment->handle_closed ||
                           self->segment->generation != fork_generation);
}

/* ---- Moving to the successor of a removed bus.
 *
 * Invariants:
 *  - The move is atomic under the interpreter lock: lane and segment are the old pair before and
 *    the new pair after. At the move no thread copies into the old lane, and nothing in the old
 *    lane is open.
 *  - A thread waiting on the segment without the interpreter lock holds a reference and afterwards
 *    checks again for the writer's current segment.
 *  - Counts continue across buses. */
/* Poll interval for a successor; and, below, for threads waiting for the moving thread. */
#define POLL_US 20000
#define MOVE_POLL_US 500

/* Attach to the next segment and move there; false with an exception. */
static bool move_to(WriterObject *self, SegmentObject *next) {
    struct writer fresh;
    if (!attach(&fresh, next, self->label)) {
        return false;
    }
    /* A second thread's copy ends in its own record: a removed bus grants no new claims. */
    while (self->busy > 0 && !self->closing) {
        pause_us(MOVE_POLL_US);
    }
    if (!py_writer_usable(self)) {
        writer_close(&fresh);
        return false;
    }
    leave_bus(self);
    self->committed_base += fresh.sequence - self->c.sequence;
    self->aborted_base += fresh.aborted - self->c.aborted;
    self->c = fresh;
    Py_SETREF(self->segment, (SegmentObject *)Py_NewRef((PyObject *)next));
    return true;
}

/* 1 after a move, by whatever thread; 0 without a successor yet; -1 with an exception. */
static int try_to_move(WriterObject *self) {
    SegmentObject *before = self->segment;
    PyObject *next = PyObject_CallMethod((PyObject *)self, "_successor", NULL);
    if (next == NULL || next == Py_None) {
        Py_XDECREF(next);
        return next == NULL ? -1 : 0;
    }
    int moved = -1;
    if (!PyObject_TypeCheck(next, &SegmentType)) {
        PyErr_SetString(PyExc_TypeError, "_successor: expected a Segment");
    } else if (self->segment != before) {
        moved = 1;
    } else if (py_writer_usable(self)) {
        moved = move_to(self, (SegmentObject *)next) ? 1 : -1;
    }
    if (self->segment != (SegmentObject *)next && PyObject_TypeCheck(next, &SegmentType)) {
        PyObject *error = py_set_aside_error();
        py_segment_release_handle((SegmentObject *)next);
        py_restore_error(error);
    }
    Py_DECREF(next);
    return moved;
}

static bool follow(WriterObject *self, double timeout_s) {
    SegmentObject *removed = (SegmentObject *)Py_NewRef((PyObject *)self->segment);
    uint64_t start = clock_monotonic_ns();
    double next_watch_s = py_watch_first_s(&self->watch);
    int moved = 0;
    while (moved == 0) {
        if (self->moving) {
            pause_us(MOVE_POLL_US);
        } else {
            self->moving = true;
            moved = try_to_move(self);
            self->moving = false;
        }
        double waited_s = (double)(clock_monotonic_ns() - start) / 1e9;
        if (moved != 0) {
            break;
        }
        if (self->segment != removed) {
            moved = 1;
        } else if (timeout_s >= 0 && waited_s >= timeout_s) {
            py_segment_raise_removed(removed);
            moved = -1;
        } else {
            pause_us(POLL_US);
            if (Py_MakePendingCalls() < 0 ||
                (waited_s >= next_watch_s &&
                 !py_watch_call(&self->watch, waited_s, &next_watch_s)) ||
                !py_writer_usable(self)) {
                moved = -1;
            }
        }
    }
    Py_DECREF(removed);
    return moved > 0;
}

/* _follow(): enable moving to the bus opened by the subclass's `_successor`. */
static PyObject *py_writer_follow(WriterObject *self, PyObject *Py_UNUSED(ignored)) {
    self->follow = follow;
    Py_RETURN_NONE;
}

/* _go_on(timeout_s): py_writer_go_on, if the bus was removed. */
static PyObject *py_writer_go_on_call(WriterObject *self, PyObject *timeout) {
    double timeout_s;
    if (!py_parse_timeout(timeout, &timeout_s) || !py_writer_usable(self)) {
        return NULL;
    }
    if (removal_happened(&self->segment->c) && !py_writer_go_on(self, timeout_s)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- The type. */
static PyMethodDef writer_methods[] = {
    METHOD("put", py_writer_put, METH_FASTCALL | METH_KEYWORDS, DOC_Writer_put),
    METHOD("put_many", py_writer_put_many, METH_VARARGS | METH_KEYWORDS, DOC_Writer_put_many),
    METHOD("_put_group", py_writer_put_group, METH_VARARGS, NULL),
    METHOD("cancelled", py_writer_cancelled, METH_VARARGS | METH_KEYWORDS, DOC_Writer_cancelled),
    METHOD("_answer", py_writer_answer, METH_FASTCALL | METH_KEYWORDS, NULL),
    METHOD("_take_requests", py_writer_take_requests, METH_VARARGS, NULL),
    METHOD("_give_back_request", py_writer_give_back_request, METH_O, NULL),
    METHOD("_holds_request", py_writer_holds_request, METH_O, NULL),
    METHOD("_recover_dead", py_writer_recover_dead, METH_NOARGS, NULL),
    METHOD("_reserve", py_writer_reserve, METH_VARARGS, NULL),
    METHOD("_want_space", py_writer_want_space, METH_NOARGS, NULL),
    METHOD("_await_space", py_writer_await_space, METH_VARARGS, NULL),
    METHOD("_watch_waits", py_writer_watch_waits, METH_VARARGS, NULL),
    METHOD("_note_unmade", py_writer_note_unmade, METH_VARARGS, NULL),
    METHOD("_follow", py_writer_follow, METH_NOARGS, NULL),
    METHOD("_go_on", py_writer_go_on_call, METH_O, NULL),
    METHOD("_declare", py_writer_declare, METH_O, NULL),
    METHOD("_counts", py_writer_counts, METH_NOARGS, NULL),
    METHOD("close", py_writer_close, METH_NOARGS, DOC_Writer_close),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef writer_getset[] = {
    {"closed", (getter)py_writer_get_closed, NULL, "True after close() and after a fork.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef writer_members[] = {
    {"_declared", T_OBJECT, offsetof(WriterObject, declared), READONLY, NULL},
    {"_segment", T_OBJECT_EX, offsetof(WriterObject, segment), READONLY, NULL},
    {"_slot", T_UINT, offsetof(WriterObject, c.slot_index), READONLY, NULL},
    {"producer_id", T_ULONGLONG, offsetof(WriterObject, c.producer_id), READONLY,
     "This producer's number; never used again on this bus."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject WriterType = {
    TYPE_BASICS("Writer", WriterObject, py_writer_dealloc, Py_TPFLAGS_BASETYPE),
    .tp_methods = writer_methods,
    .tp_getset = writer_getset,
    .tp_members = writer_members,
    .tp_init = (initproc)py_writer_init,
    .tp_new = PyType_GenericNew,
};
