/* Granter: from the ring's bell to a waiting client's socket in one call, for a daemon.
 *
 * A client that sleeps waits for two wake-ups and for what runs between them. So what runs between
 * them is C: it reads the ring into the table, leases what is complete, and writes the reply. Which
 * request that may be is decided before (`arm`), and what becomes of it is noted afterwards, both by
 * Python.
 *
 * Invariants:
 * - It grants while it is armed and nobody has the service's lock, which it has from then on. Who
 *   takes that lock disarms it first, so that what was decided holds.
 * - A group is granted where no policy has a say: what the table refuses, or leaves to be judged, is
 *   returned, and then nothing is granted.
 * - A lease is written whole and once. What the socket does not take is returned.
 * - While it sleeps openly, no group is complete that a client could take. */
#define _GNU_SOURCE
#include "python/read/granter.h"

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>

#include "python/group/group.h"
#include "python/read/plain_reply.h"
#include "python/read/reader_object.h"
#include "python/read/recursive_lock.h"
#include "python/segment/segment.h"
#include "base/clock.h"

/* The longest number, or the longest head of bytes. */
#define NUMBER_BYTES 9u
#define LEASES_BYTES (sizeof REPLY_LEASES + sizeof REPLY_GROUPS + 2 * NUMBER_BYTES)
#define GRANTED_BYTES (sizeof REPLY_GRANTED + sizeof REPLY_SIZE + sizeof REPLY_PLACES + 3 * NUMBER_BYTES)

typedef struct {
    PyObject_HEAD
    ReaderObject *reader;
    GroupTableObject *table;
    RecursiveLockObject *lock;
    Py_ssize_t portion; /* records that one look reads at most; more are left to Python */
    uint64_t records;   /* of one reply at most, as portion */
    uint64_t granted;   /* replies that were written here */
    uint32_t splits;    /* a bit for each whose groups clients take */
    bool others;        /* groups are complete that are not in the table */
    /* The request, and where its reply goes. */
    PyObject *head; /* bytes: frames that go before it, or NULL */
    uint64_t id;
    uint64_t number; /* of the first lease */
    Py_ssize_t groups;
    uint32_t split;
    int fd;
    bool armed;
} GranterObject;

static uint8_t *put_bytes(uint8_t *to, const void *bytes, size_t size) {
    memcpy(to, bytes, size);
    return to + size;
}

#define PUT_TEXT(to, text) put_bytes(to, text, sizeof text - 1)

static uint8_t *put_big_endian(uint8_t *to, uint64_t number, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i++) {
        to[i] = (uint8_t)(number >> (8 * (bytes - 1 - i)));
    }
    return to + bytes;
}

static uint8_t *put_number(uint8_t *to, uint64_t number) {
    if (number < 0x80) {
        return put_big_endian(to, number, 1);
    }
    unsigned kind = number > UINT32_MAX ? 3 : number > UINT16_MAX ? 2 : number > UINT8_MAX ? 1 : 0;
    *to = (uint8_t)(0xcc + kind);
    return put_big_endian(to + 1, number, 1u << kind);
}

static uint8_t *put_array_head(uint8_t *to, uint64_t count) {
    if (count < 16) {
        return put_big_endian(to, 0x90 | count, 1);
    }
    bool wide = count > UINT16_MAX;
    *to = wide ? 0xdd : 0xdc;
    return put_big_endian(to + 1, count, wide ? 4 : 2);
}

static uint8_t *put_binary_head(uint8_t *to, uint64_t size) {
    unsigned kind = size > UINT16_MAX ? 2 : size > UINT8_MAX ? 1 : 0;
    *to = (uint8_t)(0xc4 + kind);
    return put_big_endian(to + 1, size, 1u << kind);
}

static uint8_t *put_entry(uint8_t *to, const GroupEntryObject *entry, uint64_t number) {
    Py_ssize_t count = PyList_GET_SIZE(entry->samples);
    to = put_number(PUT_TEXT(to, REPLY_GRANTED), number);
    to = put_number(PUT_TEXT(to, REPLY_SIZE), entry->size);
    to = put_binary_head(PUT_TEXT(to, REPLY_PLACES), (uint64_t)count * sizeof(struct wire_place));
    for (Py_ssize_t i = 0; i < count; i++) {
        const struct record_ref *ref =
            &((const TrajectoryObject *)PyList_GET_ITEM(entry->samples, i))->ref;
        struct wire_place place = {ref->place.extent, ref->place.generation, ref->place.offset,
                                   ref->bytes};
        to = put_bytes(to, &place, sizeof place);
    }
    return to;
}

/* The frame of the reply that grants these entries. */
static uint8_t *put_reply(const GranterObject *self, uint8_t *to, PyObject *entries) {
    uint8_t *body = to + FRAME_HEAD_BYTES, *end = put_number(PUT_TEXT(body, REPLY_LEASES), self->id);
    end = put_array_head(PUT_TEXT(end, REPLY_GROUPS), (uint64_t)PyList_GET_SIZE(entries));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        end = put_entry(end, (const GroupEntryObject *)PyList_GET_ITEM(entries, i),
                        self->number + (uint64_t)i);
    }
    uint32_t size = (uint32_t)(end - body);
    for (unsigned i = 0; i < FRAME_HEAD_BYTES; i++) {
        to[i] = (uint8_t)(size >> (8 * i));
    }
    return end;
}

/* How many bytes need not be written any more. */
static Py_ssize_t write_some(int fd, const uint8_t *bytes, size_t size) {
    ssize_t sent = send(fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
        return (Py_ssize_t)sent;
    }
    /* Of a client that has gone the transport reads what it still said, and then its end. */
    return errno == EAGAIN || errno == EINTR ? 0 : (Py_ssize_t)size;
}

/* Leases what is ready and writes the reply: a list of the entries. `rest` becomes what the socket
 * did not take. NULL with an exception. */
static PyObject *give(GranterObject *self, PyObject **rest, uint64_t now_ns) {
    const struct entry_list *ready = &self->table->lists.ready[self->split];
    const size_t head = self->head == NULL ? 0 : (size_t)PyBytes_GET_SIZE(self->head);
    const size_t room = head + FRAME_HEAD_BYTES + LEASES_BYTES + ready->groups * GRANTED_BYTES +
                        ready->samples * sizeof(struct wire_place);
    uint8_t *frame = PyMem_Malloc(room);
    if (frame == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *entries =
        py_group_lists_lease_ready(&self->table->lists, self->split, self->groups, now_ns);
    if (entries != NULL) {
        /* A client that has its groups finds all counts as they are then. */
        if (self->split == SHMBUS_SPLIT_TRAIN) {
            py_delivery_count(self->reader->segment, entries);
        }
        py_reader_note_table(self->reader, self->table);
        uint8_t *end = head == 0 ? frame : put_bytes(frame, PyBytes_AS_STRING(self->head), head);
        end = put_reply(self, end, entries);
        const Py_ssize_t size = end - frame, sent = write_some(self->fd, frame, (size_t)size);
        self->granted++;
        Py_SETREF(*rest, PyBytes_FromStringAndSize((char *)frame + sent, size - sent));
        if (*rest == NULL) {
            Py_CLEAR(entries); /* the daemon ends of it; the next one finds them in the ring */
        }
    }
    PyMem_Free(frame);
    return entries;
}

/* One look at the ring, with the lock: (left, entries, rest). */
static PyObject *look(GranterObject *self) {
    const struct entry_list *ready = &self->table->lists.ready[self->split];
    PyObject *left = PyList_New(0), *rest = PyBytes_FromStringAndSize(NULL, 0), *entries = NULL;
    if (left != NULL && rest != NULL && py_reader_usable(self->reader)) {
        uint64_t now_ns = clock_monotonic_ns();
        py_reader_note_seen(self->reader, now_ns);
        Py_ssize_t count = py_reader_poll_records(self->reader, self->table, self->portion,
                                                  (double)now_ns * 1e-9, left);
        bool plain = count >= 0 && count < self->portion && PyList_GET_SIZE(left) == 0 &&
                     ready->groups > 0 && ready->samples <= self->records;
        if (count >= 0) {
            entries = plain ? give(self, &rest, now_ns) : PyList_New(0);
        }
    }
    PyObject *result = entries == NULL ? NULL : PyTuple_Pack(3, left, entries, rest);
    Py_XDECREF(left);
    Py_XDECREF(entries);
    Py_XDECREF(rest);
    return result;
}

/* The kernel wakes a client on the processor of who has written to it, where it would wait until
 * this thread sleeps. */
static void let_client_run(void) {
    Py_BEGIN_ALLOW_THREADS
    sched_yield();
    Py_END_ALLOW_THREADS
}

/* Whether no client would get a group if it asked now: who finds this asleep takes that for an answer,
 * also to a request that is not read yet. */
static bool has_no_groups(const void *daemon) {
    const GranterObject *self = daemon;
    for (unsigned i = 0; i < SHMBUS_MAX_SPLITS; i++) {
        if ((self->splits >> i & 1u) != 0 && self->table->lists.ready[i].groups > 0) {
            return false;
        }
    }
    return !self->others;
}

/* wait() -> None | (left, entries, rest): sleeps until records may have come, and grants. None says
 * that nothing was read. Else the lock is the caller's, to be released by it: `left` is for a
 * policy, `entries` were leased and their reply was written but for `rest`. */
static PyObject *py_granter_wait(GranterObject *self, PyObject *ignored) {
    (void)ignored;
    if (!py_reader_usable(self->reader) ||
        py_reader_wait_for_events(self->reader, -1, 0) == WAIT_FAILED) {
        return NULL;
    }
    RecursiveLockObject *lock = self->lock;
    if (!self->armed || lock->depth > 0) {
        Py_RETURN_NONE;
    }
    /* It is free, so this does not wait: under the interpreter lock nobody else takes it now. */
    if (!py_recursive_lock_acquire(lock)) {
        return NULL;
    }
    self->armed = false;
    uint64_t granted = self->granted;
    PyObject *found = look(self);
    if (found == NULL) {
        py_recursive_lock_release(lock);
    } else if (self->granted != granted) {
        let_client_run();
    }
    return found;
}

/* arm(fd, id, split, groups, number, head): the request that waits, the number of its first lease,
 * and frames that go before its reply. With the lock. */
static PyObject *py_granter_arm(GranterObject *self, PyObject *args) {
    int fd;
    unsigned long long id, number;
    unsigned int split;
    Py_ssize_t groups;
    PyObject *head;
    if (!PyArg_ParseTuple(args, "iKInKO!", &fd, &id, &split, &groups, &number, &PyBytes_Type,
                          &head)) {
        return NULL;
    }
    if (split >= SHMBUS_MAX_SPLITS || groups < 1) {
        PyErr_Format(PyExc_ValueError,
                     "arm: expected a split below %u and at least one group, got %u and %zd",
                     SHMBUS_MAX_SPLITS, split, groups);
        return NULL;
    }
    self->fd = fd;
    self->id = id;
    self->split = split;
    self->groups = groups;
    self->number = number;
    Py_XSETREF(self->head, Py_NewRef(head));
    self->armed = true;
    Py_RETURN_NONE;
}

/* disarm(): nothing is granted until the next arm(). */
static PyObject *py_granter_disarm(GranterObject *self, PyObject *ignored) {
    (void)ignored;
    self->armed = false;
    Py_RETURN_NONE;
}

static int py_granter_init(GranterObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"reader", "table", "lock", "portion", "records", NULL};
    PyObject *reader, *table, *lock;
    unsigned long long records;
    if (self->reader != NULL) {
        PyErr_SetString(PyExc_TypeError, "this granter is initialised already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!$nK", names, &ReaderType, &reader,
                                     &GroupTableType, &table, &RecursiveLockType, &lock,
                                     &self->portion, &records)) {
        return -1;
    }
    self->records = records;
    self->reader = (ReaderObject *)Py_NewRef(reader);
    self->table = (GroupTableObject *)Py_NewRef(table);
    self->lock = (RecursiveLockObject *)Py_NewRef(lock);
    self->splits = UINT32_MAX;
    self->reader->daemon = self;
    self->reader->sleeps_openly = has_no_groups;
    return 0;
}

static void py_granter_dealloc(GranterObject *self) {
    if (self->reader != NULL && self->reader->daemon == self) {
        self->reader->sleeps_openly = NULL;
    }
    Py_XDECREF(self->reader);
    Py_XDECREF(self->table);
    Py_XDECREF(self->lock);
    Py_XDECREF(self->head);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef granter_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))py_granter_wait, METH_NOARGS, NULL},
    {"arm", (PyCFunction)(void (*)(void))py_granter_arm, METH_VARARGS, NULL},
    {"disarm", (PyCFunction)(void (*)(void))py_granter_disarm, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef granter_members[] = {
    {"armed", T_BOOL, offsetof(GranterObject, armed), READONLY, NULL},
    {"granted", T_ULONGLONG, offsetof(GranterObject, granted), READONLY, NULL},
    {"splits", T_UINT, offsetof(GranterObject, splits), 0, NULL},
    {"others", T_BOOL, offsetof(GranterObject, others), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject GranterType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Granter",
    .tp_basicsize = sizeof(GranterObject),
    .tp_dealloc = (destructor)py_granter_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = granter_methods,
    .tp_members = granter_members,
    .tp_init = (initproc)py_granter_init,
    .tp_new = PyType_GenericNew,
};
