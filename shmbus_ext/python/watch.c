/* The watchdog of a wait (see watch.h). */
#include "python/watch.h"

#include <math.h>

double py_watch_first_s(const struct watch *self) {
    return self->call == NULL ? INFINITY : self->period_s;
}

bool py_watch_call(const struct watch *self, double waited_s, double *next_s) {
    if (self->call == NULL) {
        return true;
    }
    *next_s = waited_s + self->period_s;
    /* It may replace itself. */
    PyObject *call = Py_NewRef(self->call);
    PyObject *result = PyObject_CallFunction(call, "d", waited_s);
    Py_DECREF(call);
    Py_XDECREF(result);
    return result != NULL;
}
