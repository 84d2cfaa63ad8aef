/* ClosedByBlock: the end of a `with` block calls `close()`, and no signal's handler comes between. */
#ifndef SHMBUS_PYTHON_CLOSING_H
#define SHMBUS_PYTHON_CLOSING_H

#include "python/binding.h"

extern PyTypeObject ClosedByBlockType;
bool py_closing_init(void);

#endif
