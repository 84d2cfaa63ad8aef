/* channel_send_alike and channel_receive_alike: functions of the module. */
#ifndef SHMBUS_PYTHON_CHANNEL_CHANNEL_ALIKE_H
#define SHMBUS_PYTHON_CHANNEL_CHANNEL_ALIKE_H

#include "python/binding.h"

bool py_channel_alike_add_functions(PyObject *module);

#endif
