/* The score of a trajectory (see score.h). */
#include "python/record/score.h"

#include "python/hooks.h"

static PyObject *py_trajectory_get_scored(TrajectoryObject *self, void *ignored) {
    (void)ignored;
    return PyBool_FromLong(py_trajectory_has_score(self));
}

bool py_trajectory_require_score(const TrajectoryObject *self) {
    if (py_trajectory_has_score(self)) {
        return true;
    }
    PyErr_Format(hooks.unscored_error,
                 "trajectory %R[%S] of producer %llu: expected a score, got none yet: it was put "
                 "with score=None; set trajectory.score, or give OnlineDataHandler a score_group, "
                 "before it is trained on",
                 self->instance_id, self->index, (unsigned long long)self->producer_id);
    return false;
}

static PyObject *py_trajectory_get_score(TrajectoryObject *self, void *ignored) {
    (void)ignored;
    return py_trajectory_require_score(self) ? PyFloat_FromDouble(self->score) : NULL;
}

/* Of this object alone: the record keeps what its producer said, for whoever reads it next. */
static int py_trajectory_set_score(TrajectoryObject *self, PyObject *value, void *ignored) {
    (void)ignored;
    if (!self->unscored) {
        PyErr_Format(PyExc_AttributeError,
                     "trajectory %R[%S]: score: expected one that its producer left open, by "
                     "score=None, got one that it has set; it cannot be changed",
                     self->instance_id, self->index);
        return -1;
    }
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "score cannot be deleted");
        return -1;
    }
    double score = PyFloat_AsDouble(value);
    if (score == -1.0 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "trajectory %R[%S]: score: expected a float, got %.100s",
                         self->instance_id, self->index, Py_TYPE(value)->tp_name);
        }
        return -1;
    }
    if (!isfinite(score)) {
        PyErr_Format(PyExc_ValueError,
                     "trajectory %R[%S]: score: expected a finite number, got %S; drop a group "
                     "that cannot be scored",
                     self->instance_id, self->index, value);
        return -1;
    }
    self->score = score;
    return 0;
}

static PyGetSetDef attributes[] = {
    {"score", (getter)py_trajectory_get_score, (setter)py_trajectory_set_score,
     "The reward: float; of one that was put with score=None, what was set here.", NULL},
    {"scored", (getter)py_trajectory_get_scored, NULL, "Whether it has a score: bool.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

bool py_score_add_attributes(PyObject *module) {
    (void)module;
    for (PyGetSetDef *each = attributes; each->name != NULL; each++) {
        PyObject *descriptor = PyDescr_NewGetSet(&TrajectoryType, each);
        if (descriptor == NULL ||
            PyDict_SetItemString(TrajectoryType.tp_dict, each->name, descriptor) < 0) {
            Py_XDECREF(descriptor);
            return false;
        }
        Py_DECREF(descriptor);
    }
    PyType_Modified(&TrajectoryType);
    return true;
}
