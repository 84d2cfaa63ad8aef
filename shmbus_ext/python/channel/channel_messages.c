/* Sending, receiving and acknowledging for Python: mapping of slots, lifetime of views.
 *
 * Invariant: a handle has at most one current ChannelMemory; its memory ends before its slot
 * changes hands. */
#define _GNU_SOURCE
#include "python/channel/channel.h"

#include <sys/mman.h>

#include "base/checksum.h"
#include "python/hooks.h"
#include "python/segment/segment.h"

/* Map a slot; NULL in *at for an empty range. -1 with an exception. */
static int map_slot(ChannelObject *self, uint32_t slot, uint64_t bytes, uint8_t **at) {
    uint64_t needed = channel_align_up(bytes, CHANNEL_PAGE);
    *at = NULL;
    if (needed == 0) {
        return 0;
    }
    if (self->slots[slot].mapped < needed) {
        if (self->slots[slot].at != NULL) {
            munmap(self->slots[slot].at, self->slots[slot].mapped);
            self->slots[slot].at = NULL;
            self->slots[slot].mapped = 0;
        }
        bool writable = self->c.side == CHANNEL_SENDER;
        uint8_t *mapped = channel_map_slot(&self->c, slot, needed, writable);
        if (mapped == NULL) {
            py_companion_system_error(&self->base);
            return -1;
        }
        self->slots[slot].at = mapped;
        self->slots[slot].mapped = needed;
    }
    *at = self->slots[slot].at;
    return 0;
}

/* End the message's memory; remaining views keep a copy. False with an exception. */
static bool py_channel_end_memory(ChannelObject *self) {
    ChannelMemoryObject *memory = self->memory;
    if (memory == NULL) {
        return true;
    }
    if (memory->exports > 0 && memory->at != NULL) {
        if (!py_channel_memory_keep(memory, self->slots[self->memory_slot].mapped)) {
            py_companion_system_error(&self->base);
            return false;
        }
        self->slots[self->memory_slot].at = NULL;
        self->slots[self->memory_slot].mapped = 0;
    }
    (void)py_channel_memory_end(memory);
    self->memory = NULL;
    Py_DECREF(memory);
    return true;
}

/* channel_begin(channel, bytes, meta_bytes): memory for the next message's payload; None while
 * every slot is taken; a status if memory ran out or the segment is damaged. */
static PyObject *py_channel_begin(PyObject *Py_UNUSED(module), PyObject *args) {
    ChannelObject *self;
    unsigned long long bytes, meta_bytes;
    uint32_t slot = 0;
    if (!PyArg_ParseTuple(args, "O!KK", &ChannelType, &self, &bytes, &meta_bytes) ||
        !py_companion_usable(&self->base) || !py_channel_has_side(self, CHANNEL_SENDER)) {
        return NULL;
    }
    if (bytes > self->c.max_bytes || meta_bytes > CHANNEL_MAX_META_BYTES ||
        channel_meta_at(bytes) + meta_bytes > self->c.slot_stride) {
        return PyErr_Format(
            PyExc_ValueError,
            "channel '%U': a message of %llu bytes and %llu of meta fits no slot of "
            "%llu bytes",
            self->base.name, bytes, meta_bytes, U64(self->c.max_bytes));
    }
    if (!py_channel_end_memory(self)) {
        return NULL;
    }
    enum shared_status status;
    py_companion_add_user(&self->base);
    Py_BEGIN_ALLOW_THREADS
    status = messages_begin(&self->c, bytes, meta_bytes, &slot);
    Py_END_ALLOW_THREADS
    py_companion_drop_user(&self->base);
    if (status == SHARED_NOTHING) {
        Py_RETURN_NONE;
    }
    if (status != SHARED_OK) {
        return py_companion_status(&self->base, status);
    }
    uint8_t *at;
    if (!py_companion_usable(&self->base) ||
        map_slot(self, slot, channel_meta_at(bytes) + meta_bytes, &at) < 0) {
        return NULL;
    }
    self->memory = py_channel_memory_new(at, bytes, false);
    self->memory_slot = slot;
    return Py_XNewRef((PyObject *)self->memory);
}

/* channel_send(channel, kind, meta, reason): publish the message begun by channel_begin. */
static PyObject *py_channel_send(PyObject *Py_UNUSED(module), PyObject *args) {
    ChannelObject *self;
    int kind;
    Py_buffer meta;
    const char *reason;
    if (!PyArg_ParseTuple(args, "O!iy*s", &ChannelType, &self, &kind, &meta, &reason)) {
        return NULL;
    }
    PyObject *result = NULL;
    if (!py_companion_usable(&self->base) || !py_channel_has_side(self, CHANNEL_SENDER)) {
        goto done;
    }
    ChannelMemoryObject *memory = self->memory;
    size_t length = (size_t)meta.len;
    if (memory == NULL || memory->exports > 0 || kind < CHANNEL_STEP || kind >= CHANNEL_KINDS ||
        (length > 0 && channel_meta_at(memory->bytes) + length >
                           self->slots[self->memory_slot].mapped)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "channel_send: expected memory of channel_begin without views, room for the "
                        "meta, and a kind of message");
        goto done;
    }
    enum shared_status status =
        messages_send(&self->c, (enum channel_kind)kind, memory->bytes,
                      self->slots[self->memory_slot].at, meta.buf, length, reason);
    if (py_channel_end_memory(self)) {
        result = PyLong_FromLong(status);
    }
done:
    PyBuffer_Release(&meta);
    return result;
}

/* channel_receive(channel): (kind, step, memory, meta, reason) of the oldest message; None if the
 * channel is empty; a status if the message is damaged. */
static PyObject *py_channel_receive(PyObject *Py_UNUSED(module), PyObject *args) {
    ChannelObject *self;
    struct channel_row row;
    if (!PyArg_ParseTuple(args, "O!", &ChannelType, &self) || !py_companion_usable(&self->base) ||
        !py_channel_has_side(self, CHANNEL_RECEIVER)) {
        return NULL;
    }
    enum shared_status status = messages_peek(&self->c, &row);
    if (status == SHARED_NOTHING) {
        Py_RETURN_NONE;
    }
    if (status != SHARED_OK) {
        return PyLong_FromLong(status);
    }
    if (!py_channel_end_memory(self)) {
        return NULL;
    }
    uint32_t slot = (uint32_t)(row.sequence % self->c.slots);
    uint64_t end = row.meta_bytes > 0 ? channel_meta_at(row.bytes) + row.meta_bytes : row.bytes;
    uint8_t *at;
    if (map_slot(self, slot, end, &at) < 0) {
        return NULL;
    }
    const char *meta_at = at == NULL ? NULL : (const char *)at + channel_meta_at(row.bytes);
    PyObject *meta = PyBytes_FromStringAndSize(row.meta_bytes > 0 ? meta_at : NULL,
                                               (Py_ssize_t)row.meta_bytes);
    if (meta == NULL) {
        return NULL;
    }
    if (shmbus_crc32c(0, PyBytes_AS_STRING(meta), row.meta_bytes) != row.meta_crc) {
        Py_DECREF(meta);
        return PyLong_FromLong(SHARED_DAMAGED);
    }
    self->memory = py_channel_memory_new(at, row.bytes, true);
    self->memory_slot = slot;
    if (self->memory == NULL) {
        Py_DECREF(meta);
        return NULL;
    }
    return Py_BuildValue("(iLONN)", (int)row.kind, (long long)row.step, self->memory, meta,
                         FIELD_TEXT(row.reason));
}

/* channel_ack(channel): acknowledge the message from channel_receive; its views keep a copy. */
static PyObject *py_channel_ack(PyObject *Py_UNUSED(module), PyObject *args) {
    ChannelObject *self;
    if (!PyArg_ParseTuple(args, "O!", &ChannelType, &self) || !py_companion_usable(&self->base) ||
        !py_channel_has_side(self, CHANNEL_RECEIVER)) {
        return NULL;
    }
    NEVER(self->memory == NULL, NULL);
    if (!py_channel_end_memory(self)) {
        return NULL;
    }
    messages_ack(&self->c);
    Py_RETURN_NONE;
}

/* channel_drop(channel): end the current memory; a received message stays the oldest. */
static PyObject *py_channel_drop(PyObject *Py_UNUSED(module), PyObject *args) {
    ChannelObject *self;
    if (!PyArg_ParseTuple(args, "O!", &ChannelType, &self)) {
        return NULL;
    }
    if (self->base.generation != fork_generation || py_channel_end_memory(self)) {
        Py_RETURN_NONE;
    }
    return NULL;
}

/* channel_counts(channel): (sent, acked, step_base, growths), or a status. */
static PyObject *py_channel_counts(PyObject *Py_UNUSED(module), PyObject *args) {
    ChannelObject *self;
    struct channel_counts counts;
    if (!PyArg_ParseTuple(args, "O!", &ChannelType, &self) || !py_companion_usable(&self->base)) {
        return NULL;
    }
    enum shared_status status = messages_counts(&self->c, &counts);
    if (status != SHARED_OK) {
        return PyLong_FromLong(status);
    }
    uint64_t growths = RELAXED(self->c.header->growths);
    return Py_BuildValue("(KKLK)", U64(counts.sent), U64(counts.acked), (long long)counts.step_base,
                         U64(growths));
}

/* channel_begin_at(channel, step): number the next message `step`, withdrawing unacknowledged
 * messages; a status. */
static PyObject *py_channel_begin_at(PyObject *Py_UNUSED(module), PyObject *args) {
    ChannelObject *self;
    long long step;
    if (!PyArg_ParseTuple(args, "O!L", &ChannelType, &self, &step) || !py_companion_usable(&self->base) ||
        !py_channel_has_side(self, CHANNEL_SENDER)) {
        return NULL;
    }
    return py_companion_status(&self->base, messages_begin_at(&self->c, step));
}

PyMethodDef py_channel_messages_functions[] = {
    {"channel_begin", py_channel_begin, METH_VARARGS, NULL},
    {"channel_send", py_channel_send, METH_VARARGS, NULL},
    {"channel_receive", py_channel_receive, METH_VARARGS, NULL},
    {"channel_ack", py_channel_ack, METH_VARARGS, NULL},
    {"channel_drop", py_channel_drop, METH_VARARGS, NULL},
    {"channel_counts", py_channel_counts, METH_VARARGS, NULL},
    {"channel_begin_at", py_channel_begin_at, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
