/* Take: from the ring to a list of groups under lease. Intake does it, ConsumerBase.take calls
 * it. */
#ifndef SHMBUS_PYTHON_TAKE_H
#define SHMBUS_PYTHON_TAKE_H

#include "python/binding.h"

extern PyTypeObject IntakeType, ConsumerBaseType;
bool py_take_add_words(void);

#endif
