/* The watchdog of a wait: called with the seconds waited, at the end of every period of it. */
#ifndef SHMBUS_PYTHON_WATCH_H
#define SHMBUS_PYTHON_WATCH_H

#include "python/binding.h"

struct watch {
    PyObject *call;  /* call(waited_s); NULL for none */
    double period_s;
};

/* When it is to be called first, in seconds of the wait; never where there is none. */
double py_watch_first_s(const struct watch *self);
/* Calls it, and says when next; false with an exception, which ends the wait. */
bool py_watch_call(const struct watch *self, double waited_s, double *next_s);

#endif
