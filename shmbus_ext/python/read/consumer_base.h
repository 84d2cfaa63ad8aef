/* ConsumerBase: the part of shmbus.Consumer that is called most. */
#ifndef SHMBUS_PYTHON_CONSUMER_BASE_H
#define SHMBUS_PYTHON_CONSUMER_BASE_H

#include "python/binding.h"

extern PyTypeObject ConsumerBaseType;
bool py_take_add_words(void);

#endif
