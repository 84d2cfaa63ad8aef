/* What a Channel does with messages: methods as functions of the module. */
#ifndef SHMBUS_PYTHON_CHANNEL_CHANNEL_MESSAGES_H
#define SHMBUS_PYTHON_CHANNEL_CHANNEL_MESSAGES_H

#include "python/binding.h"
#include "python/channel/channel_object.h"

/* Ends the memory of the message that is being written or read, if any; views that are left keep a
 * copy. False with an exception where there is no memory for one. */
bool py_channel_end_memory(ChannelObject *self);
bool py_channel_messages_add_functions(PyObject *module);

#endif
