/* GroupBase: the base of shmbus.Group: read access to the samples of one lease.
 *
 * Written in C because a trainer makes one object per group and reads it sample by sample.
 *
 * Invariant: `samples` is the lease's own list and never changes. `trajectories` is a copy made at
 * first access, so the caller's changes never affect the acknowledged samples. */
#include "python/group/group.h"
#include "public_docs.h"


typedef struct {
    PyObject_HEAD
    PyObject *consumer;
    PyObject *lease;
    PyObject *key;
    PyObject *samples;
    PyObject *trajectories; /* NULL until first access */
    PyObject *state;
    unsigned int size;
    bool seen; /* set by the caller's first access */
} GroupObject;

/* Read key, samples and size from the lease: a GroupEntry, or an object with the same
 * attributes. */
static bool read_lease(GroupObject *self, PyObject *lease) {
    if (Py_IS_TYPE(lease, &GroupEntryType)) {
        const GroupEntryObject *entry = (const GroupEntryObject *)lease;
        self->key = Py_NewRef(entry->key);
        self->samples = Py_NewRef(entry->samples);
        self->size = entry->size;
        return true;
    }
    if (Py_IS_TYPE(lease, &ClientLeaseType)) {
        const ClientLeaseObject *own = (const ClientLeaseObject *)lease;
        self->key = Py_XNewRef(own->key);
        self->samples = Py_XNewRef(own->samples);
        self->size = own->size;
        return self->samples != NULL;
    }
    self->key = PyObject_GetAttr(lease, py_word.key);
    self->samples = PyObject_GetAttr(lease, py_word.samples);
    PyObject *size = PyObject_GetAttr(lease, py_word.size);
    if (self->key == NULL || self->samples == NULL || size == NULL) {
        Py_XDECREF(size);
        return false;
    }
    self->size = (unsigned int)PyLong_AsUnsignedLong(size);
    Py_DECREF(size);
    if (!PyErr_Occurred() && !PyList_Check(self->samples)) {
        PyErr_Format(PyExc_TypeError, "samples: expected a list, got %.100s",
                     Py_TYPE(self->samples)->tp_name);
    }
    return !PyErr_Occurred();
}

PyObject *py_group_new(PyTypeObject *type, PyObject *consumer, PyObject *lease) {
    GroupObject *self = (GroupObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->consumer = Py_NewRef(consumer);
    self->lease = Py_NewRef(lease);
    self->state = Py_NewRef(py_word.leased);
    if (!read_lease(self, lease)) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* make(consumer, leases) -> list: a group of this type per lease. */
static PyObject *py_group_make(PyObject *type, PyObject *args) {
    PyObject *consumer, *leases;
    if (!PyArg_ParseTuple(args, "OO!", &consumer, &PyList_Type, &leases)) {
        return NULL;
    }
    PyObject *groups = PyList_New(PyList_GET_SIZE(leases));
    for (Py_ssize_t i = 0; groups != NULL && i < PyList_GET_SIZE(groups); i++) {
        py_list_set(&groups, i,
                    py_group_new((PyTypeObject *)type, consumer, PyList_GET_ITEM(leases, i)));
    }
    return groups;
}

PyObject *py_group_lease(PyObject *group, PyObject *consumer) {
    const GroupObject *self = (const GroupObject *)group;
    return PyObject_TypeCheck(group, &GroupBaseType) && self->consumer == consumer &&
                   self->state == py_word.leased
               ? self->lease
               : NULL;
}

void py_group_set_state(PyObject *group, PyObject *state) {
    Py_XSETREF(((GroupObject *)group)->state, Py_NewRef(state));
}

/* A group destroyed unseen during an exception never reached its taker: a signal handler raised on
 * the way. Its lease goes back as if never taken. Otherwise a lease outlives its group until ended
 * explicitly. */
static void give_back_unseen(GroupObject *self) {
    if (!self->seen && self->state == py_word.leased && self->lease != NULL && PyErr_Occurred()) {
        GroupEntryObject *entry = (GroupEntryObject *)self->lease;
        if (Py_IS_TYPE(self->lease, &GroupEntryType) && entry->place == ENTRY_LEASED) {
            py_group_entry_give_back(entry);
        } else if (Py_IS_TYPE(self->lease, &ClientLeaseType)) {
            HolderObject *borrower = ((ClientLeaseObject *)self->lease)->borrower;
            borrower->kind->take_back(borrower, self->lease);
        }
    }
}

static PyObject *visible(const GroupObject *self) {
    return self->trajectories != NULL ? self->trajectories : self->samples;
}

static PyObject *py_group_trajectories(GroupObject *self, void *Py_UNUSED(ignored)) {
    self->seen = true;
    if (self->trajectories == NULL) {
        self->trajectories = PyList_GetSlice(self->samples, 0, PY_SSIZE_T_MAX);
    }
    return Py_XNewRef(self->trajectories);
}

static PyObject *py_group_instance_id(GroupObject *self, void *Py_UNUSED(ignored)) {
    self->seen = true;
    return Py_NewRef(PyTuple_CheckExact(self->key) ? PyTuple_GET_ITEM(self->key, 0) : self->key);
}

static PyObject *py_group_round(GroupObject *self, void *Py_UNUSED(ignored)) {
    self->seen = true;
    return Py_NewRef(PyTuple_CheckExact(self->key) ? PyTuple_GET_ITEM(self->key, 1) : Py_None);
}

static Py_ssize_t py_group_length(GroupObject *self) {
    self->seen = true;
    return PyList_GET_SIZE(visible(self));
}

static PyObject *py_group_item(GroupObject *self, PyObject *position) {
    self->seen = true;
    return PyObject_GetItem(visible(self), position);
}

static PyObject *py_group_iter(GroupObject *self) {
    self->seen = true;
    return PyObject_GetIter(visible(self));
}

static int py_group_traverse(GroupObject *self, visitproc visit, void *arg) {
    Py_VISIT(self->consumer);
    Py_VISIT(self->lease);
    Py_VISIT(self->key);
    Py_VISIT(self->samples);
    Py_VISIT(self->trajectories);
    return 0;
}

static int py_group_clear(GroupObject *self) {
    Py_CLEAR(self->consumer);
    Py_CLEAR(self->lease);
    return 0;
}

static void py_group_dealloc(GroupObject *self) {
    PyObject_GC_UnTrack(self);
    give_back_unseen(self);
    py_group_clear(self);
    Py_XDECREF(self->key);
    Py_XDECREF(self->samples);
    Py_XDECREF(self->trajectories);
    Py_XDECREF(self->state);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef group_methods[] = {
    METHOD("make", py_group_make, METH_VARARGS | METH_CLASS, DOC_GroupBase_make),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef group_members[] = {
    {"_consumer", T_OBJECT_EX, offsetof(GroupObject, consumer), READONLY, NULL},
    {"_lease", T_OBJECT_EX, offsetof(GroupObject, lease), READONLY, NULL},
    {"size", T_UINT, offsetof(GroupObject, size), READONLY, DOC_GroupBase_size},
    {"state", T_OBJECT_EX, offsetof(GroupObject, state), 0, DOC_GroupBase_state},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef group_getset[] = {
    {"instance_id", (getter)py_group_instance_id, NULL, DOC_GroupBase_instance_id, NULL},
    {"round", (getter)py_group_round, NULL, DOC_GroupBase_round, NULL},
    {"trajectories", (getter)py_group_trajectories, NULL, DOC_GroupBase_trajectories, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods group_sequence = {.sq_length = (lenfunc)py_group_length};
static PyMappingMethods group_mapping = {.mp_length = (lenfunc)py_group_length,
                                         .mp_subscript = (binaryfunc)py_group_item};

PyTypeObject GroupBaseType = {
    TYPE_BASICS("GroupBase", GroupObject, py_group_dealloc,
                Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC),
    .tp_traverse = (traverseproc)py_group_traverse,
    .tp_clear = (inquiry)py_group_clear,
    .tp_doc = DOC_GroupBase,
    .tp_methods = group_methods,
    .tp_members = group_members,
    .tp_getset = group_getset,
    .tp_as_sequence = &group_sequence,
    .tp_as_mapping = &group_mapping,
    .tp_iter = (getiterfunc)py_group_iter,
};

static PyObject *samples_of(PyObject *group) {
    if (!PyObject_TypeCheck(group, &GroupBaseType)) {
        return PyErr_Format(PyExc_TypeError, "groups: expected Groups of a Consumer, got %.100s",
                            Py_TYPE(group)->tp_name);
    }
    return visible((const GroupObject *)group);
}

/* Total trajectories of the groups; -1 with an exception. */
static Py_ssize_t count_members(PyObject *groups, int64_t *sizes) {
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); i++) {
        PyObject *samples = samples_of(PyList_GET_ITEM(groups, i));
        if (samples == NULL) {
            return -1;
        }
        sizes[i] = PyList_GET_SIZE(samples);
        total += sizes[i];
    }
    return total;
}

PyObject *py_group_members(PyObject *groups, PyObject **sizes) {
    npy_intp count = PyList_GET_SIZE(groups);
    *sizes = PyArray_SimpleNew(1, &count, NPY_INT64);
    Py_ssize_t total =
        *sizes == NULL ? -1 : count_members(groups, PyArray_DATA((PyArrayObject *)*sizes));
    PyObject *all = total < 0 ? NULL : PyList_New(total);
    for (Py_ssize_t i = 0, next = 0; all != NULL && i < count; i++) {
        PyObject *own = visible((GroupObject *)PyList_GET_ITEM(groups, i));
        for (Py_ssize_t j = 0; j < PyList_GET_SIZE(own); j++) {
            PyList_SET_ITEM(all, next++, Py_NewRef(PyList_GET_ITEM(own, j)));
        }
    }
    return all;
}
