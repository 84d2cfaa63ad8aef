/* A channel for Python: the handle, the memory of a message, sending and receiving. */
#pragma once

#include "python/binding.h"
#include "channel/channel.h"
#include "python/companion.h"

/* ---- ChannelMemory: a buffer over a message's payload. */
typedef struct {
    PyObject_HEAD
    uint8_t *at;       /* NULL for an empty payload */
    size_t bytes;      /* of payload */
    size_t mapped;     /* bytes of the mapping at `at`, if owned by this object */
    bool read_only;
    bool ended;        /* the message left this process: no new view */
    Py_ssize_t exports;
    uint32_t generation;
} ChannelMemoryObject;

extern PyTypeObject ChannelMemoryType;

ChannelMemoryObject *py_channel_memory_new(uint8_t *at, size_t bytes, bool read_only);
/* End the memory. True if views are left; the caller then hands over the mapping by
 * py_channel_memory_keep. */
bool py_channel_memory_end(ChannelMemoryObject *self);
/* Replace the mapping by a private copy for the views' life; on failure unchanged, false with
 * errno. */
bool py_channel_memory_keep(ChannelMemoryObject *self, size_t mapped);

/* ---- Channel: one process's handle of a channel, and its treatment at fork and at close. */
typedef struct {
    CompanionObject base;
    struct channel c;
    struct {
        uint8_t *at;
        size_t mapped;
    } slots[CHANNEL_MAX_SLOTS];
    ChannelMemoryObject *memory; /* of the message being written or read, or NULL */
    uint32_t memory_slot;
} ChannelObject;

extern PyTypeObject ChannelType;

/* True if this handle is the given side; otherwise false with an exception. */
bool py_channel_has_side(ChannelObject *self, enum channel_side_name side);

/* Registered by module.c. */
extern PyMethodDef py_channel_messages_functions[];
