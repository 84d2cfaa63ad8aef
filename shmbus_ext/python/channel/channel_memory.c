/* ChannelMemory: a message's payload as a buffer, in place.
 *
 * Invariants: a view that was made of a receiver's memory never changes: where views outlive the
 * acknowledgement, their pages are replaced by a copy at the same address before the sender may
 * write. Without such views no byte is copied. */
#define _GNU_SOURCE
#include "python/channel/channel_memory.h"

#include <sys/mman.h>

#include "python/hooks.h"
#include "python/segment/segment_object.h"

ChannelMemoryObject *py_channel_memory_new(uint8_t *at, size_t bytes, bool read_only) {
    ChannelMemoryObject *self = PyObject_New(ChannelMemoryObject, &ChannelMemoryType);
    if (self != NULL) {
        self->at = at;
        self->bytes = bytes;
        self->mapped = 0;
        self->read_only = read_only;
        self->ended = false;
        self->exports = 0;
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

static void memory_release(ChannelMemoryObject *self, Py_buffer *view) {
    (void)view;
    self->exports--;
}

static PyMemberDef memory_members[] = {
    {"bytes", T_ULONGLONG, offsetof(ChannelMemoryObject, bytes), READONLY, NULL},
    {"exports", T_PYSSIZET, offsetof(ChannelMemoryObject, exports), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyBufferProcs memory_buffer = {
    .bf_getbuffer = (getbufferproc)memory_get,
    .bf_releasebuffer = (releasebufferproc)memory_release,
};

PyTypeObject ChannelMemoryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.ChannelMemory",
    .tp_basicsize = sizeof(ChannelMemoryObject),
    .tp_dealloc = (destructor)py_channel_memory_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_members = memory_members,
    .tp_as_buffer = &memory_buffer,
};
