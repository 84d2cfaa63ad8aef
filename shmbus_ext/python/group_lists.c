/* GroupEntry: one that left its table. It is ready to be leased, leased, or in neither list any more.
 *
 * Invariants:
 * - A row is in at most one list, which owns a reference to it; so a lease outlives its holder's
 *   object, and a lease that nobody ended stays one.
 * - Entries are leased in the order in which they became ready; one given back is the next. */
#include "take.h"

#include "ring/clock.h"

GroupEntryObject *row_new(const struct group_entry *row, PyObject *key) {
    GroupEntryObject *made = PyObject_New(GroupEntryObject, &GroupEntryType);
    if (made == NULL) {
        return NULL;
    }
    made->key = Py_NewRef(key);
    made->rows = NULL;
    made->previous = made->next = NULL;
    made->place = ROW_NOWHERE;
    made->born_s = row->born_s;
    made->size = row->width;
    made->missing = row->missing;
    made->nbytes = 0;
    made->leased_ns = 0;
    made->samples = PyList_New((Py_ssize_t)(row->width - row->missing));
    if (made->samples == NULL) {
        Py_CLEAR(made);
    }
    return made;
}

static uint64_t cells_of(const GroupEntryObject *row) {
    return (uint64_t)PyList_GET_SIZE(row->samples);
}

static struct row_list *list_of(GroupTableObject *self, enum row_place place) {
    return place == ROW_READY ? &self->ready : &self->leased;
}

/* Between two neighbours, one of which may be missing. The list's reference is the caller's. */
static void link_between(GroupTableObject *self, enum row_place place, GroupEntryObject *previous,
                         GroupEntryObject *row, GroupEntryObject *next) {
    struct row_list *list = list_of(self, place);
    row->rows = self;
    row->place = place;
    row->previous = previous;
    row->next = next;
    *(previous == NULL ? &list->first : &previous->next) = row;
    *(next == NULL ? &list->last : &next->previous) = row;
    list->rows++;
    list->cells += cells_of(row);
}

/* Out of its list; the list's reference becomes the caller's. */
static void unlink_row(GroupEntryObject *row) {
    struct row_list *list = list_of(row->rows, row->place);
    *(row->previous == NULL ? &list->first : &row->previous->next) = row->next;
    *(row->next == NULL ? &list->last : &row->next->previous) = row->previous;
    list->rows--;
    list->cells -= cells_of(row);
    row->rows = NULL;
    row->previous = row->next = NULL;
    row->place = ROW_NOWHERE;
}

void rows_push_ready(GroupTableObject *self, GroupEntryObject *row) {
    Py_INCREF(row);
    link_between(self, ROW_READY, self->ready.last, row, NULL);
}

void rows_clear_lists(GroupTableObject *self) {
    for (int i = 0; i < 2; i++) {
        struct row_list *list = i == 0 ? &self->ready : &self->leased;
        while (list->first != NULL) {
            GroupEntryObject *row = list->first;
            unlink_row(row);
            Py_DECREF(row);
        }
    }
}

static GroupEntryObject *leased_row(GroupTableObject *self, PyObject *row) {
    if (!Py_IS_TYPE(row, &GroupEntryType) || ((GroupEntryObject *)row)->rows != self ||
        ((GroupEntryObject *)row)->place != ROW_LEASED) {
        PyErr_Format(PyExc_ValueError, "expected a row under lease here, got %R", row);
        return NULL;
    }
    return (GroupEntryObject *)row;
}

/* push(row): one that is in no list becomes the last that is ready. */
PyObject *rows_py_push(GroupTableObject *self, PyObject *row) {
    if (!Py_IS_TYPE(row, &GroupEntryType) || ((GroupEntryObject *)row)->place != ROW_NOWHERE) {
        PyErr_Format(PyExc_ValueError, "push: expected a row that is in no list, got %R", row);
        return NULL;
    }
    rows_push_ready(self, (GroupEntryObject *)row);
    Py_RETURN_NONE;
}

PyObject *rows_lease_ready(GroupTableObject *self, Py_ssize_t limit) {
    uint64_t ready = self->ready.rows;
    PyObject *leased = PyList_New(limit < 0 ? 0 : (uint64_t)limit < ready ? limit : (Py_ssize_t)ready);
    uint64_t now_ns = ready > 0 ? clock_monotonic_ns() : 0;
    for (Py_ssize_t i = 0; leased != NULL && i < PyList_GET_SIZE(leased); i++) {
        GroupEntryObject *row = self->ready.first;
        unlink_row(row);
        row->leased_ns = now_ns;
        link_between(self, ROW_LEASED, self->leased.last, row, NULL);
        PyList_SET_ITEM(leased, i, Py_NewRef((PyObject *)row));
    }
    return leased;
}

/* lease(limit) -> list[GroupEntry]: what has been ready longest. */
PyObject *rows_lease(GroupTableObject *self, PyObject *argument) {
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    if (limit == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return rows_lease_ready(self, limit);
}

/* end_lease(row): it is in no list any more. */
PyObject *rows_end_lease(GroupTableObject *self, PyObject *argument) {
    GroupEntryObject *row = leased_row(self, argument);
    if (row == NULL) {
        return NULL;
    }
    unlink_row(row);
    Py_DECREF(row);
    Py_RETURN_NONE;
}

/* give_back(row): a leased one is the next to be leased. */
PyObject *rows_give_back(GroupTableObject *self, PyObject *argument) {
    GroupEntryObject *row = leased_row(self, argument);
    if (row == NULL) {
        return NULL;
    }
    unlink_row(row);
    link_between(self, ROW_READY, NULL, row, self->ready.first);
    Py_RETURN_NONE;
}

/* is_leased(row) -> bool: whether this leased it, and the lease has not ended. */
PyObject *rows_is_leased(GroupTableObject *self, PyObject *row) {
    return PyBool_FromLong(Py_IS_TYPE(row, &GroupEntryType) && ((GroupEntryObject *)row)->rows == self &&
                           ((GroupEntryObject *)row)->place == ROW_LEASED);
}

/* ready_samples() -> list: those of ready rows, in their order. */
PyObject *rows_ready_samples(GroupTableObject *self, PyObject *ignored) {
    (void)ignored;
    PyObject *found = PyList_New((Py_ssize_t)self->ready.cells);
    Py_ssize_t to = 0;
    for (const GroupEntryObject *row = self->ready.first; found != NULL && row != NULL; row = row->next) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(row->samples); i++) {
            PyList_SET_ITEM(found, to++, Py_NewRef(PyList_GET_ITEM(row->samples, i)));
        }
    }
    return found;
}

/* full(key) -> list[GroupEntry]: the rows of that key that are ready or leased. */
PyObject *rows_full(GroupTableObject *self, PyObject *key) {
    PyObject *found = PyList_New(0);
    for (int i = 0; i < 2; i++) {
        GroupEntryObject *row = i == 0 ? self->ready.first : self->leased.first;
        for (; found != NULL && row != NULL; row = row->next) {
            int equal = PyObject_RichCompareBool(row->key, key, Py_EQ);
            if (equal < 0 || (equal > 0 && PyList_Append(found, (PyObject *)row) < 0)) {
                Py_CLEAR(found);
            }
        }
    }
    return found;
}

static void row_dealloc(GroupEntryObject *self) {
    Py_XDECREF(self->key);
    Py_XDECREF(self->samples);
    PyObject_Free(self);
}

static PyMemberDef row_members[] = {
    {"key", T_OBJECT_EX, offsetof(GroupEntryObject, key), READONLY, "Its samples' key."},
    {"samples", T_OBJECT_EX, offsetof(GroupEntryObject, samples), READONLY,
     "The samples that are in, by index. Not to be changed."},
    {"size", T_UINT, offsetof(GroupEntryObject, size), READONLY, "Samples of a full one."},
    {"missing", T_UINT, offsetof(GroupEntryObject, missing), READONLY, "How many are not in."},
    {"born_s", T_DOUBLE, offsetof(GroupEntryObject, born_s), READONLY, "When its first sample came."},
    {"nbytes", T_LONGLONG, offsetof(GroupEntryObject, nbytes), READONLY, "Under count_bytes."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject GroupEntryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.GroupEntry",
    .tp_basicsize = sizeof(GroupEntryObject),
    .tp_dealloc = (destructor)row_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_members = row_members,
};
