/* Methods of Trajectory that read all of its fields at once, and copy them out of the ring.
 *
 * Invariants: an array that is copied here is a view with a pin until its copy is made, so another
 * thread may acknowledge the group in between. A copy holds nothing of the ring, nor of a consumer. */
#include "python/record/copies.h"

#include "python/hooks.h"
#include "python/segment/split_labels.h"

/* A tuple with what `make` gives for each field, in the producer's order. */
static PyObject *each_field(TrajectoryObject *self,
                            PyObject *(*make)(TrajectoryObject *self, int field)) {
    if (!py_trajectory_readable(self)) {
        return NULL;
    }
    PyObject *all = PyTuple_New((Py_ssize_t)self->schema->count);
    for (int field = 0; all != NULL && field < (int)self->schema->count; field++) {
        PyObject *one = make(self, field);
        if (one == NULL) {
            Py_CLEAR(all);
        } else {
            PyTuple_SET_ITEM(all, field, one);
        }
    }
    return all;
}

static PyObject *name_of(const TrajectoryObject *self, int field) {
    return PyTuple_GET_ITEM(self->schema->names, field);
}

static PyObject *make_item(TrajectoryObject *self, int field) {
    PyObject *view = py_trajectory_view(self, field);
    PyObject *item = view == NULL ? NULL : PyTuple_Pack(2, name_of(self, field), view);
    Py_XDECREF(view);
    return item;
}

static PyObject *py_trajectory_items(TrajectoryObject *self, PyObject *ignored) {
    (void)ignored;
    return each_field(self, make_item);
}

static PyObject *py_trajectory_values(TrajectoryObject *self, PyObject *ignored) {
    (void)ignored;
    return each_field(self, py_trajectory_view);
}

static PyObject *owned_fields(TrajectoryObject *self) {
    PyObject *fields = PyDict_New();
    for (int field = 0; fields != NULL && field < (int)self->schema->count; field++) {
        PyObject *view = py_trajectory_view(self, field);
        PyObject *own =
            view == NULL ? NULL : PyArray_NewCopy((PyArrayObject *)view, NPY_CORDER);
        Py_XDECREF(view);
        if (own == NULL || PyDict_SetItem(fields, name_of(self, field), own) < 0) {
            Py_CLEAR(fields);
        }
        Py_XDECREF(own);
    }
    return fields;
}

/* The hook gets the arguments of TrajectoryCopy, its meta still encoded. */
static PyObject *py_trajectory_copy(TrajectoryObject *self, PyObject *ignored) {
    (void)ignored;
    if (!py_trajectory_readable(self)) {
        return NULL;
    }
    /* Before the fields: other threads may run while those are copied. */
    PyObject *meta = PyBytes_FromStringAndSize(
        (const char *)py_trajectory_bytes(self) + self->meta_offset, self->meta_bytes);
    PyObject *round = self->round == SHMBUS_NO_ROUND ? Py_NewRef(Py_None)
                                                     : PyLong_FromLongLong(self->round);
    PyObject *split = py_split_label(self->holder->segment, self->split);
    PyObject *fields =
        meta == NULL || round == NULL || split == NULL ? NULL : owned_fields(self);
    if (fields == NULL) {
        Py_XDECREF(meta);
        Py_XDECREF(round);
        Py_XDECREF(split);
        return NULL;
    }
    PyObject *arguments = Py_BuildValue(
        "(OOOiNNOdLLKKKKNN)", self->instance_id, self->index, self->group_size, (int)self->need,
        round, split, self->key, self->score, (long long)self->policy_version,
        (long long)self->policy_version + (long long)self->version_span,
        (unsigned long long)self->producer_id,
        (unsigned long long)self->sequence, (unsigned long long)self->committed_ns,
        (unsigned long long)self->ref.bytes, meta, fields);
    PyObject *copy = arguments == NULL
                         ? NULL
                         : PyObject_CallOneArg(hooks.copy_trajectory, arguments);
    Py_XDECREF(arguments);
    return copy;
}

static PyObject *py_trajectory_to_dict(TrajectoryObject *self, PyObject *ignored) {
    PyObject *copy = py_trajectory_copy(self, ignored);
    PyObject *dict = copy == NULL ? NULL : PyObject_CallMethod(copy, "to_dict", NULL);
    Py_XDECREF(copy);
    return dict;
}

static PyObject *py_trajectory_reduce(TrajectoryObject *self, PyObject *ignored) {
    (void)ignored;
    return PyErr_Format(PyExc_TypeError,
                        "trajectory %R[%S] is under lease, and its arrays are views of the ring: "
                        "it cannot be pickled or sent to another process; pickle its .copy(), "
                        "which owns its arrays",
                        self->instance_id, self->index);
}

PyDoc_STRVAR(items_doc,
    "items($self)\n--\n\n"
    "Return the names of the array fields, each with its read-only view.\n\n"
    "Returns\n-------\n"
    "tuple of (str, numpy.ndarray)\n"
    "    In the producer's order; ``dict(trajectory.items())`` has all fields.\n\n"
    "Raises\n------\n"
    "BusClosedError, TypeError\n"
    "    As for `get`.");

PyDoc_STRVAR(values_doc,
    "values($self)\n--\n\n"
    "Return the read-only views of all array fields.\n\n"
    "Returns\n-------\n"
    "tuple of numpy.ndarray\n"
    "    In the producer's order.\n\n"
    "Raises\n------\n"
    "BusClosedError, TypeError\n"
    "    As for `get`.");

PyDoc_STRVAR(copy_doc,
    "copy($self)\n--\n\n"
    "Copy it out of the ring.\n\n"
    "Returns\n-------\n"
    "TrajectoryCopy\n"
    "    It is read in the same way, owns its arrays, and can be pickled.\n\n"
    "Raises\n------\n"
    "BusClosedError, TypeError\n"
    "    As for `get`.");

PyDoc_STRVAR(to_dict_doc,
    "to_dict($self)\n--\n\n"
    "Return the keywords of `Producer.put` that put it again, with owned arrays.\n\n"
    "Returns\n-------\n"
    "dict\n"
    "    \"instance_id\", \"group_size\", \"index\", \"score\", \"policy_version\", \"round\", \"split\",\n"
    "    \"need\", \"meta\", and each array field by its name.\n\n"
    "Raises\n------\n"
    "BusClosedError, TypeError\n"
    "    As for `get`.");

static PyMethodDef methods[] = {
    {"items", (PyCFunction)(void (*)(void))py_trajectory_items, METH_NOARGS, items_doc},
    {"values", (PyCFunction)(void (*)(void))py_trajectory_values, METH_NOARGS, values_doc},
    {"copy", (PyCFunction)(void (*)(void))py_trajectory_copy, METH_NOARGS, copy_doc},
    {"to_dict", (PyCFunction)(void (*)(void))py_trajectory_to_dict, METH_NOARGS, to_dict_doc},
    {"__reduce__", (PyCFunction)(void (*)(void))py_trajectory_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_copies_add_methods(PyObject *module) {
    (void)module;
    for (PyMethodDef *method = methods; method->ml_name != NULL; method++) {
        PyObject *descriptor = PyDescr_NewMethod(&TrajectoryType, method);
        if (descriptor == NULL ||
            PyDict_SetItemString(TrajectoryType.tp_dict, method->ml_name, descriptor) < 0) {
            Py_XDECREF(descriptor);
            return false;
        }
        Py_DECREF(descriptor);
    }
    PyType_Modified(&TrajectoryType);
    return true;
}
