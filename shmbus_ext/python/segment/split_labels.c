/* Splits by their labels, for producers, consumers and shmbus.inspect.
 *
 * Invariant: a label never changes and is cached after its first complete read. */
#include "python/segment/segment.h"

#include "ring/observe.h"

bool py_split_check(PyObject *label) {
    if (!PyUnicode_Check(label)) {
        return py_refuse(PyExc_TypeError, "split: expected a str, got %.100s",
                         Py_TYPE(label)->tp_name);
    }
    Py_ssize_t bytes;
    const char *text = PyUnicode_AsUTF8AndSize(label, &bytes);
    if (text == NULL) {
        PyErr_Clear();
        return py_refuse(PyExc_ValueError, "split: expected text that UTF-8 can encode, got %A",
                         label);
    }
    if (bytes < 1 || bytes > (Py_ssize_t)SHMBUS_SPLIT_LABEL_BYTES ||
        memchr(text, 0, (size_t)bytes) != NULL) {
        return py_refuse(PyExc_ValueError,
                         "split: expected 1 to %u bytes of UTF-8 without NUL, such as 'train' or "
                         "'eval', got %R",
                         SHMBUS_SPLIT_LABEL_BYTES, label);
    }
    return true;
}

PyObject *py_split_label(SegmentObject *segment, uint32_t number) {
    if (number < SHMBUS_MAX_SPLITS && segment->split_labels[number] != NULL) {
        return Py_NewRef(segment->split_labels[number]);
    }
    char text[SHMBUS_SPLIT_LABEL_BYTES + 1];
    uint32_t bytes = split_label(&segment->c, number, text);
    if (bytes == 0) {
        return PyUnicode_FromFormat("#%u", number);
    }
    PyObject *label = PyUnicode_DecodeUTF8(text, (Py_ssize_t)bytes, "replace");
    if (label != NULL) {
        PyUnicode_InternInPlace(&label);
        segment->split_labels[number] = Py_NewRef(label);
    }
    return label;
}

/* Search the labels seen here, mostly by identity; "train" has a fixed number. */
static uint32_t known_number(const SegmentObject *segment, PyObject *label) {
    if (PyUnicode_CompareWithASCIIString(label, SHMBUS_SPLIT_TRAIN_LABEL) == 0) {
        return SHMBUS_SPLIT_TRAIN;
    }
    for (uint32_t number = 0; number < SHMBUS_MAX_SPLITS; number++) {
        PyObject *known = segment->split_labels[number];
        if (known != NULL && (known == label || PyUnicode_Compare(known, label) == 0)) {
            return number;
        }
    }
    return SHMBUS_MAX_SPLITS;
}

static void raise_too_many(SegmentObject *segment, PyObject *label) {
    PyObject *labels = PyList_New(0);
    for (uint32_t number = 0; labels != NULL && number < SHMBUS_MAX_SPLITS; number++) {
        py_list_add(&labels, py_split_label(segment, number));
    }
    if (labels != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "split: a bus has at most %u, and this one has %R; %R would be another: use "
                     "one of them, or another bus",
                     SHMBUS_MAX_SPLITS, labels, label);
        Py_DECREF(labels);
    }
}

uint32_t py_split_number(SegmentObject *segment, PyObject *label) {
    uint32_t number = known_number(segment, label);
    if (number < SHMBUS_MAX_SPLITS) {
        return number;
    }
    Py_ssize_t bytes;
    const char *text = PyUnicode_AsUTF8AndSize(label, &bytes);
    if (text == NULL) {
        return SHMBUS_MAX_SPLITS;
    }
    number = segment->c.read_only ? split_find(&segment->c, text, (uint32_t)bytes)
                                  : split_number(&segment->c, text, (uint32_t)bytes);
    if (number < SHMBUS_MAX_SPLITS) {
        PyObject *known = py_split_label(segment, number);
        if (known == NULL) {
            return SHMBUS_MAX_SPLITS;
        }
        Py_DECREF(known);
    } else if (segment->c.read_only) {
        PyErr_Format(PyExc_KeyError, "bus '%U' has no split %R yet", segment->name, label);
    } else {
        raise_too_many(segment, label);
    }
    return number;
}

bool py_key_hash(PyObject *key, uint64_t *hash) {
    if (!PyTuple_CheckExact(key) || PyTuple_GET_SIZE(key) < 2 ||
        !PyLong_CheckExact(PyTuple_GET_ITEM(key, 1)) || !PyUnicode_Check(PyTuple_GET_ITEM(key, 0))) {
        return false;
    }
    Py_ssize_t bytes;
    const char *id = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(key, 0), &bytes);
    long long round = PyLong_AsLongLong(PyTuple_GET_ITEM(key, 1));
    unsigned long split = SHMBUS_SPLIT_TRAIN;
    if (PyTuple_GET_SIZE(key) > 2) {
        split = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(key, 2));
    }
    if (id == NULL || PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    *hash = group_key_hash(id, (uint32_t)bytes, round, (uint32_t)split);
    return true;
}

/* split_number(segment, label) -> int: adds a new split if necessary; KeyError if mapped
 * read-only. */
static PyObject *py_split_number_call(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    PyObject *label;
    if (!PyArg_ParseTuple(args, "O&O", py_take_segment, &segment, &label) ||
        !py_split_check(label)) {
        return NULL;
    }
    uint32_t number = py_split_number(segment, label);
    return number < SHMBUS_MAX_SPLITS ? PyLong_FromUnsignedLong(number) : NULL;
}

static PyObject *split_row(SegmentObject *segment, uint32_t number) {
    struct split_entry *entry = &segment->c.splits[number];
    PyObject *label = py_split_label(segment, number);
    return label == NULL ? NULL
                         : Py_BuildValue("(INKKKII)", number, label, U64(RELAXED(entry->acked)),
                                         U64(RELAXED(entry->dropped)), U64(RELAXED(entry->stashed)),
                                         RELAXED(entry->ready_groups), RELAXED(entry->open_groups));
}

/* splits(segment) -> [(number, label, acked, dropped, stashed, ready_groups, open_groups)] */
SEGMENT_FUNCTION(py_splits, py_take_segment) {
    PyObject *found = PyList_New(0);
    for (uint32_t number = 0; found != NULL && number < SHMBUS_MAX_SPLITS; number++) {
        char text[SHMBUS_SPLIT_LABEL_BYTES + 1];
        if (split_label(&segment->c, number, text) == 0) {
            continue;
        }
        py_list_add(&found, split_row(segment, number));
    }
    return found;
}

static PyObject *py_split_label_call(PyObject *Py_UNUSED(module), PyObject *args) {
    SegmentObject *segment;
    unsigned int number;
    return PyArg_ParseTuple(args, "O&I", py_take_segment, &segment, &number)
               ? py_split_label(segment, number)
               : NULL;
}

/* check_split(label): raise TypeError or ValueError for an invalid label. */
static PyObject *py_check_split(PyObject *Py_UNUSED(module), PyObject *label) {
    return py_split_check(label) ? Py_NewRef(Py_None) : NULL;
}

PyMethodDef py_splits_functions[] = {
    {"check_split", py_check_split, METH_O, NULL},
    {"split_number", py_split_number_call, METH_VARARGS, NULL},
    {"split_label", py_split_label_call, METH_VARARGS, NULL},
    {"splits", py_splits, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
