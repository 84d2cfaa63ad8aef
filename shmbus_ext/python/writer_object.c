/* Writer: what shmbus.Producer is made of.
 *
 * Invariant: the interpreter lock serialises all calls on a lane; it is let go only while waiting
 * for space, while bytes are copied into a record that is already reserved, and when a call has
 * nothing left to do but to let the reader run. */
#define _GNU_SOURCE
#include "binding.h"

#include <sched.h>
#include <unistd.h>

#include "ring/clock.h"
#include "ring/copy.h"
#include "ring/doorbell.h"

/* Copies above this are worth letting other threads run. */
#define RELEASE_LOCK_BYTES (UINT64_C(256) << 10)
/* A waiting producer looks again after this at first, for space that it was not told of, and ever
 * more seldom, for signals and a writer that is closed under it. */
#define FIRST_SLICE_NS INT64_C(2000000)
#define WAIT_SLICE_NS INT64_C(100000000)
/* Since the reader last looked: so long that handing it the processor costs little beside it. */
#define LONG_SILENCE_NS UINT64_C(100000)
/* Closing waits in steps of this for copies that other threads have under way. */
#define CLOSE_POLL_US 50

bool writer_usable(WriterObject *self) {
    if (!self->attached || self->closing) {
        PyErr_SetString(hooks.closed_error, "this Producer is closed; make a new one");
        return false;
    }
    return segment_usable(self->segment, "Producer");
}

static int writer_init(WriterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", "label", "checksum", NULL};
    PyObject *segment;
    const char *label;
    int checksum = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!s|p", names, &SegmentType, &segment, &label,
                                     &checksum)) {
        return -1;
    }
    if (self->segment != NULL) {
        PyErr_SetString(PyExc_TypeError, "this Producer is initialised already");
        return -1;
    }
    self->segment = (SegmentObject *)Py_NewRef(segment);
    if (!segment_usable(self->segment, "handle")) {
        return -1;
    }
    enum writer_status status;
    Py_BEGIN_ALLOW_THREADS
    status = writer_attach_in_time(&self->c, &self->segment->c, label);
    Py_END_ALLOW_THREADS
    if (status == WRITER_SYSTEM_ERROR) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->segment->name);
        return -1;
    }
    if (status != WRITER_OK) {
        raise_hook(hooks.busy_error, Py_BuildValue("(Os)", segment, "producer"));
        return -1;
    }
    self->flags = checksum ? SHMBUS_FLAG_PAYLOAD_CRC : 0;
    self->attached = true;
    return 0;
}

static bool is_paused(const WriterObject *self) {
    return atomic_load_explicit(&self->segment->c.header->paused, memory_order_acquire) != 0;
}

/* A paused bus is a full one, to those who want to write. */
static enum writer_status try_claim(WriterObject *self, uint64_t bytes, struct reservation *at) {
    if (is_paused(self) && bytes <= self->segment->c.record_limit) {
        return WRITER_FULL;
    }
    return writer_claim(&self->c, bytes, at);
}

/* Lets the watchdog look at a wait that lasts; what it raises ends the wait. */
static bool watch_wait(const WriterObject *self, double waited_s, double *next_watch_s) {
    if (self->watch == NULL || waited_s < *next_watch_s) {
        return true;
    }
    *next_watch_s = waited_s + self->watch_s;
    PyObject *watch = Py_NewRef(self->watch);
    PyObject *result = PyObject_CallFunction(watch, "d", waited_s);
    Py_DECREF(watch);
    Py_XDECREF(result);
    return result != NULL;
}

/* One attempt, and where the bus is full, waiting as long as timeout_s allows. */
bool writer_claim_room(WriterObject *self, uint64_t bytes, double timeout_s, struct reservation *at) {
    enum writer_status status = try_claim(self, bytes, at);
    if (status == WRITER_OK) {
        return true;
    }
    struct segment *segment = &self->segment->c;
    if (status == WRITER_TOO_LARGE) {
        PyErr_Format(hooks.too_large_error,
                     "bus '%U': a record takes at most %llu bytes, this one needs %llu; create the "
                     "bus with a larger capacity (a record may take a quarter of it) or split the "
                     "trajectory",
                     self->segment->name, (unsigned long long)segment->record_limit,
                     (unsigned long long)bytes);
        return false;
    }
    uint64_t start = clock_monotonic_ns();
    int64_t longest_ns = FIRST_SLICE_NS;
    double next_watch_s = self->watch_s;
    self->full_waits++;
    for (;;) {
        /* What is sealed can be freed, and a sleeping reader gets the chance to. */
        writer_seal(&self->c);
        uint32_t ticket = doorbell_want_space(segment->header);
        doorbell_ring(segment->header);
        if (try_claim(self, bytes, at) == WRITER_OK) {
            return true;
        }
        double waited_s = (double)(clock_monotonic_ns() - start) / 1e9;
        if (timeout_s >= 0 && waited_s >= timeout_s) {
            raise_hook(hooks.full_error,
                       Py_BuildValue("(OKd)", self->segment, (unsigned long long)bytes, waited_s));
            return false;
        }
        int64_t slice_ns = longest_ns;
        longest_ns = longest_ns * 2 < WAIT_SLICE_NS ? longest_ns * 2 : WAIT_SLICE_NS;
        if (timeout_s >= 0 && (timeout_s - waited_s) * 1e9 < (double)slice_ns) {
            slice_ns = (int64_t)((timeout_s - waited_s) * 1e9) + 1;
        }
        /* The writer may be closed meanwhile, by a signal handler too. */
        Py_BEGIN_ALLOW_THREADS
        doorbell_await_space(segment->header, ticket, slice_ns);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0 || !watch_wait(self, waited_s, &next_watch_s) ||
            !writer_usable(self)) {
            return false;
        }
    }
}

/* A processor that several processes share goes on with the one that it has: a reader that was just
 * woken, or has fallen behind, may wait there until the producers' time slices are over. So the
 * producer steps aside: at a wake-up after a long silence, and at the end of a run where the reader
 * has not looked for a while. Where nobody else wants the processor this is one short system call.
 * Not at every wake-up: a producer and a reader on one processor would hand it to and fro for every
 * record. */
void writer_tell_reader(WriterObject *self) {
    struct bus_header *header = self->segment->c.header;
    bool woken = doorbell_ring(header);
    if (woken) {
        uint64_t seen_ns = atomic_load_explicit(&header->collector_seen_ns, memory_order_relaxed);
        woken = clock_monotonic_ns() - seen_ns > LONG_SILENCE_NS;
    }
    if (woken || self->c.ahead) {
        self->c.ahead = false;
        Py_BEGIN_ALLOW_THREADS
        sched_yield();
        Py_END_ALLOW_THREADS
    }
}

static void copy_payload(const WriterObject *self, const struct put_arguments *arguments,
                         uint8_t *record) {
    const struct record_spec *spec = &arguments->spec;
    /* A checksum reads it all again. */
    bool non_temporal =
        (self->flags & SHMBUS_FLAG_PAYLOAD_CRC) == 0 &&
        atomic_load_explicit(&self->segment->c.header->consumer_packs, memory_order_relaxed) != 0;
    if (spec->meta_bytes > 0) {
        memcpy(record + spec->meta_offset, PyBytes_AS_STRING(arguments->meta_encoded),
               spec->meta_bytes);
    }
    const uint64_t *shape = spec->shape;
    for (uint32_t i = 0; i < arguments->array_count; i++) {
        const void *data = PyArray_DATA(arguments->arrays[i]);
        if (non_temporal) {
            copy_non_temporal(record + shape[0], data, arguments->field_bytes[i]);
        } else {
            memcpy(record + shape[0], data, arguments->field_bytes[i]);
        }
        shape += 1 + arguments->field_ndim[i];
    }
    if (non_temporal) {
        copy_fence();
    }
}

void writer_write_head(WriterObject *self, const struct put_arguments *arguments,
                       const struct reservation *at) {
    record_write_frame(at->record, &at->place, at->bytes, self->c.producer_id, self->c.slot_index,
                       self->flags | arguments->spec.flags);
    record_write_body(at->record, &arguments->spec);
}

/* Lets other threads run; the writer is not closed before this is done. */
static void copy_unlocked(WriterObject *self, const struct put_arguments *arguments,
                          const struct reservation *at) {
    self->busy++;
    Py_BEGIN_ALLOW_THREADS
    copy_payload(self, arguments, (uint8_t *)at->record);
    Py_END_ALLOW_THREADS
    self->busy--;
}

/* Arguments are finished. Copies the trajectory into the ring and commits it. */
static bool put_one(WriterObject *self, struct put_arguments *arguments, double timeout_s) {
    struct reservation at;
    if (!writer_claim_room(self, arguments->spec.record_bytes, timeout_s, &at)) {
        return false;
    }
    writer_write_head(self, arguments, &at);
    if (arguments->spec.record_bytes < RELEASE_LOCK_BYTES) {
        copy_payload(self, arguments, (uint8_t *)at.record);
        writer_publish(&self->c, &at);
    } else {
        /* Reserved first, so that another thread's record can go behind it meanwhile. */
        writer_reserve(&self->c, &at);
        copy_unlocked(self, arguments, &at);
        writer_commit(&self->c, &at);
    }
    self->bytes += at.bytes;
    return true;
}

static bool take_call(struct put_arguments *arguments, PyObject *const *args, Py_ssize_t count,
                      PyObject *kwnames) {
    if (count > 1) {
        PyErr_Format(PyExc_TypeError,
                     "expected one positional argument, instance_id, got %zd; give the others by "
                     "name",
                     count);
        return false;
    }
    if (count == 1 && !arguments_take_id(arguments, args[0])) {
        return false;
    }
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < named; i++) {
        if (!arguments_take(arguments, PyTuple_GET_ITEM(kwnames, i), args[count + i])) {
            return false;
        }
    }
    return true;
}

static PyObject *put_call(WriterObject *self, PyObject *const *args, Py_ssize_t count,
                          PyObject *kwnames, uint32_t flags) {
    if (!writer_usable(self)) {
        return NULL;
    }
    struct put_arguments arguments;
    arguments_begin(&arguments);
    arguments.spec.flags = flags;
    bool done = take_call(&arguments, args, count, kwnames) &&
                arguments_finish(&arguments, &self->schemas) &&
                writer_usable(self); /* encoding may have let another thread close it */
    done = done && put_one(self, &arguments, arguments.timeout_s);
    arguments_end(&arguments);
    if (!done) {
        return NULL;
    }
    writer_tell_reader(self);
    Py_RETURN_NONE;
}

static PyObject *writer_put(WriterObject *self, PyObject *const *args, Py_ssize_t count,
                            PyObject *kwnames) {
    return put_call(self, args, count, kwnames, 0);
}

/* A report that a sample failed: put's arguments, with the reason as meta, and no arrays. */
static PyObject *writer_fail(WriterObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *kwnames) {
    return put_call(self, args, count, kwnames, SHMBUS_FLAG_FAILED);
}

/* The same where nobody knows the group's size: group_size is any above the index. */
static PyObject *writer_fail_unsized(WriterObject *self, PyObject *const *args, Py_ssize_t count,
                                     PyObject *kwnames) {
    return put_call(self, args, count, kwnames, SHMBUS_FLAG_FAILED | SHMBUS_FLAG_NO_SIZE);
}

/* Says on the exception that is set how many items were put before it. */
static void note_accepted(Py_ssize_t done) {
    PyObject *error = set_aside_error();
    PyObject *accepted = PyLong_FromSsize_t(done);
    if (accepted == NULL || PyObject_SetAttrString(error, "accepted", accepted) < 0) {
        PyErr_Clear();
    }
    Py_XDECREF(accepted);
    restore_error(error);
}

/* Items of one put_many that are in the ring, reserved and filled, and not committed. */
struct batch {
    struct reservation *at;
    Py_ssize_t open;
    Py_ssize_t committed;
    struct batch *next;
};

static void batch_commit(WriterObject *self, struct batch *batch) {
    for (Py_ssize_t i = 0; i < batch->open; i++) {
        writer_commit(&self->c, &batch->at[i]);
        self->bytes += batch->at[i].bytes;
    }
    batch->committed += batch->open;
    batch->open = 0;
}

static void batch_abort(WriterObject *self, struct batch *batch) {
    for (Py_ssize_t i = 0; i < batch->open; i++) {
        writer_abort(&self->c, &batch->at[i]);
    }
    batch->open = 0;
}

/* Say which of the items it was, where the message is one of ours. */
static void name_item(Py_ssize_t at) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == PyExc_TypeError || type == PyExc_ValueError || type == hooks.too_large_error) {
        PyErr_NormalizeException(&type, &value, &traceback);
        PyErr_Format(type, "put_many: item %zd: %S", at, value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return;
    }
    PyErr_Restore(type, value, traceback);
}

static bool parse_item(WriterObject *self, struct put_arguments *arguments, PyObject *items,
                       Py_ssize_t at) {
    arguments_begin(arguments);
    struct reservation unused;
    bool good = arguments_take_mapping(arguments, PyList_GET_ITEM(items, at)) &&
                arguments_finish(arguments, &self->schemas) && writer_usable(self) &&
                (arguments->spec.record_bytes <= self->segment->c.record_limit ||
                 writer_claim_room(self, arguments->spec.record_bytes, 0.0, &unused));
    if (!good) {
        name_item(at);
    }
    return good;
}

/* The bus is full: what is reserved must be committed before anybody can make room. So the rest is
 * checked now, since a bad item leaves the bus as it was. */
static bool batch_make_way(WriterObject *self, struct batch *batch, PyObject *items,
                           Py_ssize_t from) {
    for (Py_ssize_t i = from; i < PyList_GET_SIZE(items); i++) {
        struct put_arguments arguments;
        bool good = parse_item(self, &arguments, items, i);
        arguments_end(&arguments);
        if (!good) {
            return false;
        }
    }
    batch_commit(self, batch);
    doorbell_ring(self->segment->c.header);
    return true;
}

static bool batch_add(WriterObject *self, struct batch *batch, PyObject *items, Py_ssize_t at,
                      double deadline_s) {
    struct put_arguments arguments;
    struct reservation *to = &batch->at[batch->open];
    bool good = parse_item(self, &arguments, items, at);
    if (good && try_claim(self, arguments.spec.record_bytes, to) != WRITER_OK) {
        double left_s = -1.0;
        good = batch->committed > 0 || batch_make_way(self, batch, items, at + 1);
        if (good && batch->open > 0) {
            batch_commit(self, batch);
        }
        to = &batch->at[0];
        if (deadline_s >= 0) {
            left_s = deadline_s - (double)clock_monotonic_ns() / 1e9;
            left_s = left_s < 0 ? 0 : left_s;
        }
        good = good && writer_claim_room(self, arguments.spec.record_bytes, left_s, to);
    }
    if (good) {
        writer_write_head(self, &arguments, to);
        writer_reserve(&self->c, to);
        batch->open++;
        if (to->bytes < RELEASE_LOCK_BYTES) {
            copy_payload(self, &arguments, (uint8_t *)to->record);
        } else {
            copy_unlocked(self, &arguments, to);
        }
    }
    arguments_end(&arguments);
    return good;
}

static void forget_batch(WriterObject *self, const struct batch *batch) {
    struct batch **place = &self->batches;
    while (*place != batch) {
        place = &(*place)->next;
    }
    *place = batch->next;
}

/* put_many(items: list[dict], timeout=None) -> records put. A full bus raises with .accepted set. */
static PyObject *writer_put_many(WriterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"items", "timeout", NULL};
    PyObject *sequence, *timeout = Py_None;
    double timeout_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O", names, &sequence, &timeout) ||
        !parse_timeout(timeout, &timeout_s) || !writer_usable(self)) {
        return NULL;
    }
    if (Py_TYPE(sequence)->tp_iter == NULL && !PySequence_Check(sequence)) {
        PyErr_Format(PyExc_TypeError,
                     "put_many: expected an iterable of dicts of put's arguments, got %.100s",
                     Py_TYPE(sequence)->tp_name);
        return NULL;
    }
    PyObject *items = PySequence_List(sequence);
    if (items == NULL) {
        return NULL;
    }
    double deadline_s =
        timeout_s < 0 ? -1.0 : (double)clock_monotonic_ns() / 1e9 + timeout_s;
    Py_ssize_t count = PyList_GET_SIZE(items);
    struct batch batch = {PyMem_Malloc((size_t)(count + 1) * sizeof *batch.at), 0, 0,
                          self->batches};
    bool good = batch.at != NULL;
    if (!good) {
        PyErr_NoMemory();
    }
    self->batches = &batch;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        good = batch_add(self, &batch, items, i, deadline_s);
    }
    forget_batch(self, &batch);
    bool alive = self->attached && !self->segment->handle_closed;
    if (good || (alive && batch.committed > 0)) {
        batch_commit(self, &batch);
    } else if (alive) {
        batch_abort(self, &batch);
    }
    if (alive) {
        writer_tell_reader(self);
    }
    PyMem_Free(batch.at);
    Py_DECREF(items);
    if (!good) {
        note_accepted(batch.committed);
        return NULL;
    }
    return PyLong_FromSsize_t(batch.committed);
}

/* Announces the wish for space; try again after it, and then await_space with the ticket. */
static PyObject *writer_want_space(WriterObject *self, PyObject *ignored) {
    (void)ignored;
    if (!writer_usable(self)) {
        return NULL;
    }
    writer_seal(&self->c);
    uint32_t ticket = doorbell_want_space(self->segment->c.header);
    doorbell_ring(self->segment->c.header);
    return PyLong_FromUnsignedLong(ticket);
}

/* await_space(ticket, timeout_s): sleeps until the reader has freed some since; takes none. */
static PyObject *writer_await_space(WriterObject *self, PyObject *args) {
    double timeout_s;
    unsigned int ticket;
    if (!PyArg_ParseTuple(args, "Id", &ticket, &timeout_s) || !writer_usable(self)) {
        return NULL;
    }
    struct bus_header *header = self->segment->c.header;
    int64_t slice_ns = timeout_s < 0 || timeout_s * 1e9 > (double)WAIT_SLICE_NS
                           ? WAIT_SLICE_NS
                           : (int64_t)(timeout_s * 1e9);
    SegmentObject *segment = (SegmentObject *)Py_NewRef((PyObject *)self->segment);
    Py_BEGIN_ALLOW_THREADS
    doorbell_await_space(header, ticket, slice_ns);
    Py_END_ALLOW_THREADS
    Py_DECREF(segment);
    Py_RETURN_NONE;
}

static void writer_end(WriterObject *self) {
    if (!self->attached) {
        return;
    }
    if (self->segment->generation != fork_generation || self->segment->handle_closed) {
        self->attached = false;
        return;
    }
    /* Another thread's copy ends in its own record: the space is given up only afterwards. */
    self->closing = true;
    while (self->busy > 0) {
        Py_BEGIN_ALLOW_THREADS
        usleep(CLOSE_POLL_US);
        Py_END_ALLOW_THREADS
    }
    if (!self->attached) {
        return;
    }
    self->attached = false;
    for (struct batch *batch = self->batches; batch != NULL; batch = batch->next) {
        batch_abort(self, batch);
    }
    writer_abort_open(self);
    writer_close(&self->c);
    segment_release_handle(self->segment);
}

static PyObject *writer_py_close(WriterObject *self, PyObject *ignored) {
    (void)ignored;
    writer_end(self);
    Py_RETURN_NONE;
}

static void writer_dealloc(WriterObject *self) {
    if (self->segment != NULL) {
        writer_end(self);
    }
    schema_cache_clear(&self->schemas);
    Py_XDECREF(self->watch);
    Py_XDECREF(self->segment);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* _watch_waits(call, seconds): `call` hears of a wait for space every so many seconds of it. */
static PyObject *writer_watch_waits(WriterObject *self, PyObject *args) {
    PyObject *call;
    double seconds;
    if (!PyArg_ParseTuple(args, "Od", &call, &seconds)) {
        return NULL;
    }
    Py_XSETREF(self->watch, Py_NewRef(call));
    self->watch_s = seconds;
    Py_RETURN_NONE;
}

static PyObject *writer_counts(WriterObject *self, PyObject *ignored) {
    (void)ignored;
    return Py_BuildValue("(KKKK)", (unsigned long long)self->c.sequence,
                         (unsigned long long)self->c.aborted, (unsigned long long)self->bytes,
                         (unsigned long long)self->full_waits);
}

static PyObject *writer_get_closed(WriterObject *self, void *ignored) {
    (void)ignored;
    return PyBool_FromLong(!self->attached || self->segment->handle_closed ||
                           self->segment->generation != fork_generation);
}

static PyMethodDef writer_methods[] = {
    {"put", (PyCFunction)(void (*)(void))writer_put, METH_FASTCALL | METH_KEYWORDS,
     "put(instance_id, *, group_size, index, score=0.0, policy_version=0, epoch=None, meta=None,\n"
     "    timeout=None, **arrays)\n--\n\n"
     "Copy one trajectory into the ring and commit it; see shmbus.Producer."},
    {"put_many", (PyCFunction)(void (*)(void))writer_put_many, METH_VARARGS | METH_KEYWORDS,
     "put_many(items, *, timeout=None)\n--\n\n"
     "Put a list of dicts of put's arguments; see shmbus.Producer."},
    {"_fail", (PyCFunction)(void (*)(void))writer_fail, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_fail_unsized", (PyCFunction)(void (*)(void))writer_fail_unsized,
     METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_reserve", (PyCFunction)(void (*)(void))writer_reserve_slot, METH_VARARGS, NULL},
    {"_want_space", (PyCFunction)(void (*)(void))writer_want_space, METH_NOARGS, NULL},
    {"_await_space", (PyCFunction)(void (*)(void))writer_await_space, METH_VARARGS, NULL},
    {"_watch_waits", (PyCFunction)(void (*)(void))writer_watch_waits, METH_VARARGS, NULL},
    {"_counts", (PyCFunction)(void (*)(void))writer_counts, METH_NOARGS, NULL},
    {"close", (PyCFunction)(void (*)(void))writer_py_close, METH_NOARGS,
     "close()\n--\n\nAbort open reservations and leave the bus; what was committed stays."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef writer_getset[] = {
    {"closed", (getter)writer_get_closed, NULL, "True after close() and after a fork.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef writer_members[] = {
    {"_segment", T_OBJECT_EX, offsetof(WriterObject, segment), READONLY, NULL},
    {"producer_id", T_ULONGLONG, offsetof(WriterObject, c.producer_id), READONLY,
     "This producer's number; never used again on this bus."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject WriterType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Writer",
    .tp_basicsize = sizeof(WriterObject),
    .tp_dealloc = (destructor)writer_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_methods = writer_methods,
    .tp_getset = writer_getset,
    .tp_members = writer_members,
    .tp_init = (initproc)writer_init,
    .tp_new = PyType_GenericNew,
};
