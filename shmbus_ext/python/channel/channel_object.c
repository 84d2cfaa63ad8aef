/* Channel: mapping, sides, statements and bells.
 *
 * Invariants: a handle keeps one side for life. Calls without the interpreter lock hold the
 * mapping, even if another thread closes the handle. A forked child has no mapping and no lock. */
#define _GNU_SOURCE
#include "python/channel/channel.h"

#include <sys/mman.h>
#include <unistd.h>

#include "python/hooks.h"
#include "python/segment/segment.h"

bool py_channel_has_side(ChannelObject *self, enum channel_side_name side) {
    if (self->c.side < 0) {
        /* Usually by an interrupted close(). */
        return py_refuse(
            hooks.closed_error,
            "channel '%U': this handle is no side, or has left; open the channel again",
            self->base.name);
    }
    NEVER(self->c.side != (int32_t)side, false);
    return true;
}

static void shut(CompanionObject *base) {
    ChannelObject *self = (ChannelObject *)base;
    ChannelMemoryObject *memory = self->memory;
    self->memory = NULL;
    if (memory != NULL) {
        size_t mapped = self->slots[self->memory_slot].mapped;
        if (memory->exports > 0 && memory->at != NULL && self->slots[self->memory_slot].at != NULL) {
            if (!py_channel_memory_keep(memory, mapped)) {
                memory->mapped = mapped; /* no memory for a copy: the views keep the slot's pages */
            }
            self->slots[self->memory_slot].at = NULL;
        }
        (void)py_channel_memory_end(memory);
        Py_DECREF(memory);
    }
    for (size_t i = 0; i < CHANNEL_MAX_SLOTS; i++) {
        if (self->slots[i].at != NULL) {
            munmap(self->slots[i].at, self->slots[i].mapped);
            self->slots[i].at = NULL;
        }
    }
    channel_unmap(&self->c);
}

static void isolate(CompanionObject *base) {
    ChannelObject *self = (ChannelObject *)base;
    self->c.file.control = NULL; /* a child inherits no mapping */
    for (size_t i = 0; i < CHANNEL_MAX_SLOTS; i++) {
        self->slots[i].at = NULL;
        self->slots[i].mapped = 0;
    }
}

static enum shared_status open_channel(CompanionObject *self, int fd, bool read_only) {
    return channel_open(&((ChannelObject *)self)->c, fd, read_only);
}

/* A side rings its bell after each of its actions. */
static struct bell *bell_of(CompanionObject *self, unsigned int side) {
    return side < CHANNEL_SIDES ? channel_bell(((ChannelObject *)self)->c.header,
                                               (enum channel_side_name)side)
                                : NULL;
}

static const struct companion_kind channel_kind = {
    "channel", offsetof(ChannelObject, c.file), open_channel, shut, isolate, bell_of,
};

static PyObject *py_channel_create(PyTypeObject *type, PyObject *args) {
    int fd;
    PyObject *name;
    unsigned int slots;
    unsigned long long max_bytes;
    if (!PyArg_ParseTuple(args, "iUIK", &fd, &name, &slots, &max_bytes)) {
        return NULL;
    }
    if (!channel_fits(slots, max_bytes)) {
        return PyErr_Format(
            PyExc_ValueError,
            "channel '%U': expected 1 to %u slots of 1 to %llu bytes, got %u of %llu", name,
            CHANNEL_MAX_SLOTS, U64(CHANNEL_MAX_BYTES), slots, max_bytes);
    }
    CompanionObject *self = py_companion_alloc(type, &channel_kind, name);
    if (self == NULL) {
        return NULL;
    }
    ((ChannelObject *)self)->c.side = -1;
    return py_companion_result(
        self, channel_create(&((ChannelObject *)self)->c, fd, slots, max_bytes));
}

static PyObject *py_channel_open(PyTypeObject *type, PyObject *args) {
    return py_companion_open(type, &channel_kind, args);
}

static bool is_side(unsigned int side) {
    NEVER(side >= CHANNEL_SIDES, false);
    return true;
}

/* claim(side, label): False if another process holds the side. */
static PyObject *py_channel_claim(ChannelObject *self, PyObject *args) {
    unsigned int side;
    const char *label;
    if (!PyArg_ParseTuple(args, "Is", &side, &label) || !is_side(side) ||
        !py_companion_usable(&self->base)) {
        return NULL;
    }
    NEVER(self->c.side >= 0 || self->c.file.read_only, NULL);
    enum shared_status status =
        sides_claim(&self->c, (enum channel_side_name)side, label, (uint32_t)getpid());
    return py_companion_claimed(&self->base, status);
}

/* leave(reason): tell the peer about a voluntary end. */
static PyObject *py_channel_leave(ChannelObject *self, PyObject *args) {
    const char *reason;
    if (!PyArg_ParseTuple(args, "s", &reason) || !py_companion_usable(&self->base)) {
        return NULL;
    }
    sides_leave(&self->c, reason);
    Py_RETURN_NONE;
}

static PyObject *py_channel_state(ChannelObject *self, PyObject *args) {
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*", &data)) {
        return NULL;
    }
    bool fits = data.len <= CHANNEL_STATEMENT_BYTES;
    bool may = py_companion_usable(&self->base) && fits && self->c.side >= 0;
    if (may) {
        sides_state(&self->c, data.buf, (uint32_t)data.len);
    } else if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "channel '%U': expected a side's statement of at most %u bytes, got %zd",
                     self->base.name, CHANNEL_STATEMENT_BYTES, data.len);
    }
    PyBuffer_Release(&data);
    return may ? Py_NewRef(Py_None) : NULL;
}

/* stated(side): the version of its statement, 0 before the first; cheap. */
static PyObject *py_channel_stated(ChannelObject *self, PyObject *args) {
    unsigned int side;
    if (!PyArg_ParseTuple(args, "I", &side) || !is_side(side) || !py_companion_usable(&self->base)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(sides_stated(&self->c, (enum channel_side_name)side));
}

/* statement(side): (version, bytes), or a status. */
static PyObject *py_channel_statement(ChannelObject *self, PyObject *args) {
    unsigned int side;
    uint32_t length;
    uint64_t version;
    if (!PyArg_ParseTuple(args, "I", &side) || !is_side(side) || !py_companion_usable(&self->base)) {
        return NULL;
    }
    uint8_t *copy = PyMem_Malloc(CHANNEL_STATEMENT_BYTES);
    if (copy == NULL) {
        return PyErr_NoMemory();
    }
    enum shared_status status =
        sides_statement(&self->c, (enum channel_side_name)side, copy, &length, &version);
    PyObject *result = status == SHARED_OK
                           ? Py_BuildValue("(Ky#)", U64(version), (char *)copy, (Py_ssize_t)length)
                           : PyLong_FromLong(status);
    PyMem_Free(copy);
    return result;
}

/* look(side): (life, pid, claims, label, reason) of the side. */
static PyObject *py_channel_look(ChannelObject *self, PyObject *args) {
    unsigned int side;
    if (!PyArg_ParseTuple(args, "I", &side) || !is_side(side) || !py_companion_usable(&self->base)) {
        return NULL;
    }
    enum channel_life life = sides_life(&self->c, (enum channel_side_name)side);
    struct channel_side row;
    memcpy(&row, &self->c.sides[side], sizeof row);
    return Py_BuildValue("(iIKNN)", (int)life, (unsigned int)row.pid, U64(row.claims),
                         FIELD_TEXT(row.label), FIELD_TEXT(row.reason));
}

static PyMethodDef channel_methods[] = {
    METHOD("create", py_channel_create, METH_VARARGS | METH_CLASS, NULL),
    METHOD("open", py_channel_open, METH_VARARGS | METH_CLASS, NULL),
    METHOD("claim", py_channel_claim, METH_VARARGS, NULL),
    METHOD("leave", py_channel_leave, METH_VARARGS, NULL),
    METHOD("close", py_companion_close, METH_NOARGS, NULL),
    METHOD("state", py_channel_state, METH_VARARGS, NULL),
    METHOD("stated", py_channel_stated, METH_VARARGS, NULL),
    METHOD("statement", py_channel_statement, METH_VARARGS, NULL),
    METHOD("look", py_channel_look, METH_VARARGS, NULL),
    METHOD("announce", py_companion_announce, METH_VARARGS, NULL),
    METHOD("wait", py_companion_wait, METH_VARARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef channel_members[] = {
    {"slots", T_UINT, offsetof(ChannelObject, c.slots), READONLY, NULL},
    {"max_bytes", T_ULONGLONG, offsetof(ChannelObject, c.max_bytes), READONLY, NULL},
    {"file_bytes", T_ULONGLONG, offsetof(ChannelObject, c.file_bytes), READONLY, NULL},
    {"fd", T_INT, offsetof(ChannelObject, c.file.fd), READONLY, NULL},
    {"closed", T_BOOL, offsetof(ChannelObject, base.handle_closed), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ChannelType = {
    TYPE_BASICS("Channel", ChannelObject, py_companion_dealloc, 0),
    .tp_methods = channel_methods,
    .tp_members = channel_members,
};

/* ---- ChannelMemory: a message's payload as a buffer, in place.
 *
 * Invariants: a view of a receiver's memory never changes. If views outlive the acknowledgement, a
 * copy at the same address replaces their pages before the sender may write. Without such views no
 * byte is copied. */
ChannelMemoryObject *py_channel_memory_new(uint8_t *at, size_t bytes, bool read_only) {
    ChannelMemoryObject *self =
        (ChannelMemoryObject *)ChannelMemoryType.tp_alloc(&ChannelMemoryType, 0);
    if (self != NULL) {
        self->at = at;
        self->bytes = bytes;
        self->read_only = read_only;
        self->generation = fork_generation;
    }
    return self;
}

static void py_channel_memory_dealloc(ChannelMemoryObject *self) {
    if (self->mapped > 0) {
        munmap(self->at, self->mapped);
    }
    PyObject_Free(self);
}

bool py_channel_memory_end(ChannelMemoryObject *self) {
    self->ended = true;
    return self->exports > 0;
}

bool py_channel_memory_keep(ChannelMemoryObject *self, size_t mapped) {
    void *copy = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) {
        return false;
    }
    memcpy(copy, self->at, self->bytes);
    if (mprotect(copy, mapped, PROT_READ) != 0 ||
        mremap(copy, mapped, mapped, MREMAP_MAYMOVE | MREMAP_FIXED, self->at) == MAP_FAILED) {
        munmap(copy, mapped);
        return false;
    }
    self->mapped = mapped;
    return true;
}

static int memory_get(ChannelMemoryObject *self, Py_buffer *view, int flags) {
    const char *why = self->ended ? "its step was acknowledged; clone() what is to stay"
                      : self->generation != fork_generation
                          ? "this process was forked; open the channel in the child"
                          : NULL;
    if (why != NULL) {
        PyErr_Format(PyExc_BufferError, "the memory of a channel's step: %s", why);
        view->obj = NULL;
        return -1;
    }
    static uint8_t empty;
    uint8_t *at = self->at == NULL ? &empty : self->at;
    int rc = PyBuffer_FillInfo(view, (PyObject *)self, at, (Py_ssize_t)self->bytes,
                               self->read_only, flags);
    self->exports += rc == 0;
    return rc;
}

static void memory_release(ChannelMemoryObject *self, Py_buffer *Py_UNUSED(view)) {
    self->exports--;
}

static PyMemberDef memory_members[] = {
    {"bytes", T_ULONGLONG, offsetof(ChannelMemoryObject, bytes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyBufferProcs memory_buffer = {
    .bf_getbuffer = (getbufferproc)memory_get,
    .bf_releasebuffer = (releasebufferproc)memory_release,
};

PyTypeObject ChannelMemoryType = {
    TYPE_BASICS("ChannelMemory", ChannelMemoryObject, py_channel_memory_dealloc, 0),
    .tp_members = memory_members,
    .tp_as_buffer = &memory_buffer,
};
