/* Lists of numbers out of a JSON object, as arrays: what is left of the text is small, and is parsed
 * as any JSON.
 *
 * Invariant: the rest is JSON if and only if the text was, since what was taken out was JSON. */
#include "python/gateway/lift_numbers.h"

#include <string.h>

#include "gateway/json_text.h"

/* Keys that one call may look for. */
#define MOST_KEYS 16
/* What stands in the rest for a value that was taken out. */
#define PLACEHOLDER '0'

struct wanted {
    const char *key;
    Py_ssize_t key_bytes;
    PyObject *name;
    bool floats;
    bool passed;
};

/* A part of the text that stays, from its begin up to a value that was taken out, or the end. */
struct piece {
    const char *begin;
    const char *end;
};

/* A new array of one list; NULL without an exception where it is not plain. */
static PyObject *read_list(struct json_text *text, bool floats) {
    size_t length = json_list_length(*text), bad;
    npy_intp shape = (npy_intp)length;
    PyObject *array = PyArray_SimpleNew(1, &shape, floats ? NPY_FLOAT64 : NPY_INT64);
    if (array == NULL) {
        return NULL;
    }
    void *out = PyArray_DATA((PyArrayObject *)array);
    bool plain = floats ? json_read_doubles(text, out, length, &bad)
                        : json_read_int64s(text, out, length, &bad);
    if (!plain) {
        Py_CLEAR(array);
    }
    return array;
}

/* The arrays of a list of lists, whose opening bracket was passed; NULL as above. */
static PyObject *read_rows(struct json_text *text, bool floats) {
    PyObject *rows = PyList_New(0);
    if (rows == NULL) {
        return NULL;
    }
    json_skip_space(text);
    bool plain = json_passes(text, ']');
    while (!plain && json_passes(text, '[')) {
        PyObject *row = read_list(text, floats);
        int failed = row == NULL ? -1 : PyList_Append(rows, row);
        Py_XDECREF(row);
        if (failed < 0) {
            break;
        }
        json_skip_space(text);
        if (json_passes(text, ']')) {
            plain = true;
        } else if (!json_passes(text, ',')) {
            break;
        }
        json_skip_space(text);
    }
    if (!plain) {
        Py_CLEAR(rows);
    }
    return rows;
}

static int read_wanted(PyObject *kinds, struct wanted *wanted, Py_ssize_t *count) {
    Py_ssize_t at = 0;
    PyObject *name, *floats;
    *count = 0;
    while (PyDict_Next(kinds, &at, &name, &floats)) {
        struct wanted *next = &wanted[*count];
        if (++*count > MOST_KEYS || !PyUnicode_Check(name)) {
            PyErr_Format(PyExc_ValueError, "kinds: expected at most %d keys, each a str, got others",
                         MOST_KEYS);
            return -1;
        }
        next->key = PyUnicode_AsUTF8AndSize(name, &next->key_bytes);
        if (next->key == NULL) {
            return -1;
        }
        next->name = name;
        next->floats = floats == Py_True;
        next->passed = false;
    }
    return 0;
}

static struct wanted *find(struct wanted *wanted, Py_ssize_t count, const char *key, size_t bytes) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if ((size_t)wanted[i].key_bytes == bytes && memcmp(wanted[i].key, key, bytes) == 0) {
            return &wanted[i];
        }
    }
    return NULL;
}

/* Takes the wanted lists out of an object; how many pieces stay, or 0 where it is not plain. */
static size_t lift(struct json_text *text, struct wanted *wanted, Py_ssize_t count, PyObject *into,
                   struct piece *pieces) {
    size_t used = 0;
    pieces[0].begin = text->at;
    json_skip_space(text);
    if (!json_passes(text, '{')) {
        return 0;
    }
    do {
        const char *key;
        size_t key_bytes;
        if (!json_pass_key(text, &key, &key_bytes)) {
            return 0;
        }
        struct wanted *member = find(wanted, count, key, key_bytes);
        if (member != NULL && member->passed) {
            return 0; /* which of the two counts is the parser's to say */
        }
        if (member != NULL) {
            member->passed = true;
        }
        const char *value = text->at;
        if (member == NULL || !json_passes(text, '[')) {
            if (!json_pass_value(text)) {
                return 0;
            }
        } else {
            PyObject *rows = read_rows(text, member->floats);
            int failed = rows == NULL ? -1 : PyDict_SetItem(into, member->name, rows);
            Py_XDECREF(rows);
            if (failed < 0) {
                return 0;
            }
            pieces[used++].end = value;
            pieces[used].begin = text->at;
        }
        json_skip_space(text);
    } while (json_passes(text, ','));
    if (!json_passes(text, '}')) {
        return 0;
    }
    json_skip_space(text);
    pieces[used].end = text->end;
    return text->at == text->end ? used + 1 : 0;
}

static PyObject *joined(const struct piece *pieces, size_t count) {
    Py_ssize_t bytes = (Py_ssize_t)count - 1;
    for (size_t i = 0; i < count; i++) {
        bytes += pieces[i].end - pieces[i].begin;
    }
    PyObject *rest = PyBytes_FromStringAndSize(NULL, bytes);
    if (rest == NULL) {
        return NULL;
    }
    char *to = PyBytes_AS_STRING(rest);
    for (size_t i = 0; i < count; i++) {
        size_t length = (size_t)(pieces[i].end - pieces[i].begin);
        memcpy(to, pieces[i].begin, length);
        to += length;
        if (i + 1 < count) {
            *to++ = PLACEHOLDER;
        }
    }
    return rest;
}

/* lift_numbers(text, {key: whether its numbers are floats}) -> (rest, {key: [array, ...]}), or None
 * where the text is not plain. */
static PyObject *py_lift_numbers(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer data;
    PyObject *kinds, *result = NULL;
    struct wanted wanted[MOST_KEYS + 1];
    struct piece pieces[MOST_KEYS + 1];
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*O!", &data, &PyDict_Type, &kinds)) {
        return NULL;
    }
    PyObject *arrays = PyDict_New();
    if (arrays != NULL && read_wanted(kinds, wanted, &count) == 0) {
        struct json_text text = {data.buf, (const char *)data.buf + data.len};
        size_t used = lift(&text, wanted, count, arrays, pieces);
        if (used > 0) {
            PyObject *rest = joined(pieces, used);
            result = rest == NULL ? NULL : PyTuple_Pack(2, rest, arrays);
            Py_XDECREF(rest);
        } else if (!PyErr_Occurred()) {
            result = Py_NewRef(Py_None);
        }
    }
    Py_XDECREF(arrays);
    PyBuffer_Release(&data);
    return result;
}

PyMethodDef py_lift_functions[] = {
    {"lift_numbers", py_lift_numbers, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
