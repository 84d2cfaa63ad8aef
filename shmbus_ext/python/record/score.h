/* The score of a trajectory: what its producer gave, or, where that left it open, what its reader sets.
 *
 * Invariant: what is set is of one object in one process. The record keeps what its producer said,
 * so whoever reads it after a death scores it anew. */
#ifndef SHMBUS_PYTHON_SCORE_H
#define SHMBUS_PYTHON_SCORE_H

#include "python/record/trajectory.h"

bool py_trajectory_has_score(const TrajectoryObject *self);
/* False with an exception for a sample that was put without a score, and has none since. */
bool py_trajectory_require_score(const TrajectoryObject *self);
/* The attributes `score` and `scored`. */
PyObject *py_trajectory_get_score(TrajectoryObject *self, void *ignored);
int py_trajectory_set_score(TrajectoryObject *self, PyObject *value, void *ignored);
PyObject *py_trajectory_get_scored(TrajectoryObject *self, void *ignored);

#endif
