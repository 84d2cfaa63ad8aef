/* What a Channel does with messages: methods as functions of the module. */
#ifndef SHMBUS_PYTHON_CHANNEL_CHANNEL_MESSAGES_H
#define SHMBUS_PYTHON_CHANNEL_CHANNEL_MESSAGES_H

#include "python/binding.h"

bool py_channel_messages_add_functions(PyObject *module);

#endif
