/* Channel: one process's handle of a channel, and what happens to it at fork and at close. */
#ifndef SHMBUS_PYTHON_CHANNEL_CHANNEL_OBJECT_H
#define SHMBUS_PYTHON_CHANNEL_CHANNEL_OBJECT_H

#include "channel/channel.h"
#include "python/channel/channel_memory.h"
#include "python/companion.h"

typedef struct {
    CompanionObject base;
    struct channel c;
    struct {
        uint8_t *at;
        size_t mapped;
    } slots[CHANNEL_MAX_SLOTS];
    ChannelMemoryObject *memory; /* of the message that is being written or read, or NULL */
    uint32_t memory_slot;
} ChannelObject;

extern PyTypeObject ChannelType;

/* False with an exception where this handle is not that side. */
bool py_channel_has_side(ChannelObject *self, enum channel_side_name side);

bool py_channel_add_constants(PyObject *module);

#endif
