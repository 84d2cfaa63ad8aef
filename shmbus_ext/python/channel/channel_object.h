/* Channel: one process's handle of a channel, and what happens to it at fork and at close. */
#ifndef SHMBUS_PYTHON_CHANNEL_CHANNEL_OBJECT_H
#define SHMBUS_PYTHON_CHANNEL_CHANNEL_OBJECT_H

#include "channel/channel.h"
#include "python/binding.h"
#include "python/channel/channel_memory.h"
#include "python/list.h"
#include "python/system_error.h"

typedef struct {
    PyObject_HEAD
    struct channel c;
    PyObject *name;
    struct list_link of_all;
    uint32_t generation;
    int pid;
    bool handle_closed;
    uint32_t busy; /* calls that run without the interpreter lock; the last one ends a closed handle */
    struct {
        uint8_t *at;
        size_t mapped;
    } slots[CHANNEL_MAX_SLOTS];
    ChannelMemoryObject *memory; /* of the message that is being written or read, or NULL */
    uint32_t memory_slot;
} ChannelObject;

extern PyTypeObject ChannelType;

/* False with BusClosedError where the handle is closed or from before a fork. */
bool py_channel_usable(ChannelObject *self);
bool py_channel_has_side(ChannelObject *self, enum channel_side_name side);
/* Around what runs without the interpreter lock. */
void py_channel_begin_call(ChannelObject *self);
void py_channel_end_call(ChannelObject *self);

bool py_channel_init_fork(void);
bool py_channel_add_constants(PyObject *module);

#endif
