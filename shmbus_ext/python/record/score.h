/* The score of a trajectory: what its producer gave, or, where that left it open, what its reader sets.
 *
 * Invariant: what is set is of one object in one process. The record keeps what its producer said,
 * so whoever reads it after a death scores it anew. */
#ifndef SHMBUS_PYTHON_SCORE_H
#define SHMBUS_PYTHON_SCORE_H

#include "python/record/trajectory.h"

/* False with an exception for a sample that was put without a score, and has none since. */
bool py_trajectory_require_score(const TrajectoryObject *self);
/* Adds `score` and `scored` to Trajectory. */
bool py_score_add_attributes(PyObject *module);

#endif
