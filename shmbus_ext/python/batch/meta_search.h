/* Which trajectories mention a word in their encoded meta. */
#ifndef SHMBUS_PYTHON_META_SEARCH_H
#define SHMBUS_PYTHON_META_SEARCH_H

#include "python/record/trajectory.h"

/* Whether it is a tuple of bytes; false with an exception. */
bool py_check_words(PyObject *words);
/* Whether the encoded meta of a trajectory that is readable contains one of the words. */
bool py_meta_mentions(const TrajectoryObject *t, PyObject *words);
/* False with an exception. */
bool py_append_number(PyObject *list, Py_ssize_t number);
bool py_meta_search_add_functions(PyObject *module);

#endif
