/* Delivery figures of the segment.
 *
 * Invariant: a group counts once in the life of its entry, however often a consumer gives it
 * back. */
#include "python/group/group.h"

#include "ring/observe.h"

/* Index of the shape word with the token count: of the tokens or, without them, of the record's
 * first field with rows; -1 if no field has rows. */
static int length_word(const SchemaObject *schema) {
    int at = py_schema_find(schema, py_word.tokens);
    for (int i = 0; at < 0 && i < (int)schema->count; i++) {
        at = schema->ndim[i] > 0 ? i : -1;
    }
    return at < 0 || schema->ndim[at] == 0 ? -1 : schema->shape_at[at] + 1;
}

static void count_entry(struct delivery_figures *figures, const GroupEntryObject *entry,
                        int64_t policy_version) {
    const SchemaObject *schema = NULL;
    int word = -1;
    figure_count(figures, SHMBUS_FIGURE_AGE, (double)entry->leased_ns * 1e-9 - entry->born_s);
    uint32_t samples = 0, solved = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entry->samples); i++) {
        PyObject *item = PyList_GET_ITEM(entry->samples, i);
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            continue;
        }
        const TrajectoryObject *t = (const TrajectoryObject *)item;
        if (t->schema != schema) {
            schema = t->schema;
            word = length_word(schema);
        }
        figure_count(figures, SHMBUS_FIGURE_LAG,
                     (double)policy_version - (double)t->policy_version);
        figure_count(figures, SHMBUS_FIGURE_SCORE, t->score);
        samples += isnan(t->score) ? 0 : 1; /* unscored: neither solved nor unsolved */
        solved += t->score >= SHMBUS_SOLVED_SCORE;
        if (word >= 0) {
            figure_count(figures, SHMBUS_FIGURE_LENGTH, (double)t->shape[word]);
        }
    }
    if (samples > 0) {
        figure_count(figures, SHMBUS_FIGURE_SOLVED, (double)solved / (double)samples);
    }
}

void py_delivery_count(SegmentObject *segment, PyObject *entries) {
    const int64_t version = RELAXED(segment->c.header->policy_version);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        PyObject *item = PyList_GET_ITEM(entries, i);
        if (Py_IS_TYPE(item, &GroupEntryType) && ((GroupEntryObject *)item)->leases == 1) {
            count_entry(segment->c.figures, (GroupEntryObject *)item, version);
        }
    }
}

/* count_delivered(segment, entries): for the collector; every entry must be under lease. */
static PyObject *py_count_delivered(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *entries;
    SegmentObject *segment;
    if (!PyArg_ParseTuple(args, "O&O!", py_take_segment, &segment, &PyList_Type, &entries)) {
        return NULL;
    }
    py_delivery_count(segment, entries);
    Py_RETURN_NONE;
}

/* note_useless(segment, groups): add `groups` to the dropped groups, for the collector. */
static PyObject *py_note_useless(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned long long groups;
    if (!PyArg_ParseTuple(args, "O&K", py_take_segment, &segment, &groups)) {
        return NULL;
    }
    atomic_fetch_add_explicit(&segment->c.figures->groups_dropped, groups, memory_order_relaxed);
    Py_RETURN_NONE;
}

/* groups_dropped(segment) -> int: since the bus's creation. */
SEGMENT_FUNCTION(py_groups_dropped, py_take_segment) {
    return PyLong_FromUnsignedLongLong(RELAXED(segment->c.figures->groups_dropped));
}

PyMethodDef py_delivery_functions[] = {
    {"count_delivered", py_count_delivered, METH_VARARGS, NULL},
    {"note_useless", py_note_useless, METH_VARARGS, NULL},
    {"groups_dropped", py_groups_dropped, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

PyObject *py_figure_bounds(void) {
    PyObject *all = PyTuple_New(SHMBUS_FIGURES);
    for (int f = 0; all != NULL && f < SHMBUS_FIGURES; f++) {
        PyObject *own = PyTuple_New(SHMBUS_FIGURE_BOUNDS);
        for (unsigned i = 0; own != NULL && i < SHMBUS_FIGURE_BOUNDS; i++) {
            py_tuple_set(&own, i, PyFloat_FromDouble(figure_bound((enum shmbus_figure)f, i)));
        }
        py_tuple_set(&all, f, own);
    }
    return all;
}
