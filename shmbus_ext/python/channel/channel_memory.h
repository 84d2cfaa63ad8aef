/* ChannelMemory: a buffer over a message's payload. */
#ifndef SHMBUS_PYTHON_CHANNEL_CHANNEL_MEMORY_H
#define SHMBUS_PYTHON_CHANNEL_CHANNEL_MEMORY_H

#include "python/binding.h"

typedef struct {
    PyObject_HEAD
    uint8_t *at;       /* NULL for an empty payload */
    size_t bytes;      /* of payload */
    size_t mapped;     /* bytes of the mapping that begins at `at`, where this object owns one */
    bool read_only;
    bool ended;        /* its message is no longer this process's: no new view */
    Py_ssize_t exports;
    uint32_t generation;
} ChannelMemoryObject;

extern PyTypeObject ChannelMemoryType;

ChannelMemoryObject *py_channel_memory_new(uint8_t *at, size_t bytes, bool read_only);
/* Ends it. Whether views are left: the mapping must then be given to it by py_channel_memory_keep. */
bool py_channel_memory_end(ChannelMemoryObject *self);
/* Replaces the mapping by a private copy at the same address, which lives as long as the views.
 * False with errno where there is no memory; nothing has changed then. */
bool py_channel_memory_keep(ChannelMemoryObject *self, size_t mapped);

#endif
