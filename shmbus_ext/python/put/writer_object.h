/* Writer: what shmbus.Producer is made of. */
#ifndef SHMBUS_PYTHON_WRITER_OBJECT_H
#define SHMBUS_PYTHON_WRITER_OBJECT_H

#include "python/binding.h"

extern PyTypeObject WriterType;

#endif
