/* GroupBase: what shmbus.Group is made of. */
#ifndef SHMBUS_PYTHON_GROUP_OBJECT_H
#define SHMBUS_PYTHON_GROUP_OBJECT_H

#include "python/binding.h"

extern PyTypeObject GroupBaseType;

/* A group of a type that is made of GroupBase. */
PyObject *py_group_new(PyTypeObject *type, PyObject *consumer, PyObject *lease);
/* Its lease, borrowed, where it is a group that this consumer delivered and that is under lease by
 * its own account; NULL, without an exception, of anything else. */
PyObject *py_group_lease(PyObject *group, PyObject *consumer);
void py_group_set_state(PyObject *group, PyObject *state);
/* The samples of a group, borrowed; NULL with an exception for what is none. */
PyObject *py_group_samples(PyObject *group);
/* A new list of the trajectories of all groups of a list, one behind the other, and how many are of
 * each: int64 [G]. NULL with an exception; the sizes may be there nevertheless. */
PyObject *py_group_members(PyObject *groups, PyObject **sizes);
bool py_group_add_functions(PyObject *module);

#endif
