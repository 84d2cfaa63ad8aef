/* Where the fields of the lead table, of the relay's journal and of the request lane lie, from the structs themselves. */
#include "python/requests/request_layout.h"

#include "ring/request_parts.h"

struct field_note {
    const char *name;
    size_t offset;
    size_t bytes;
    char kind; /* u, i or V */
};
#define FIELD(type, field, kind) \
    {#field, offsetof(struct type, field), sizeof(((struct type *)0)->field), kind}

static const struct field_note lead_fields[] = {
    FIELD(lead_table, limit, 'u'),     FIELD(lead_table, max_groups, 'u'),
    FIELD(lead_table, max_versions, 'u'), FIELD(lead_table, version, 'i'),
    FIELD(lead_table, ended, 'u'),     FIELD(lead_table, ended_before, 'u'),
    FIELD(lead_table, a_version, 'u'), {NULL, 0, 0, 0},
};

static const struct field_note lane_fields[] = {
    FIELD(request_lane, taken_ns, 'u'),     FIELD(request_lane, feeding, 'u'),
    FIELD(request_lane, number, 'u'),       FIELD(request_lane, offered, 'u'),
    FIELD(request_lane, done, 'u'),         FIELD(request_lane, given_up, 'u'),
    FIELD(request_lane, freeing, 'u'),      FIELD(request_lane, freeing_done, 'u'),
    FIELD(request_lane, freeing_given_up, 'u'), FIELD(request_lane, returned, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note row_fields[] = {
    FIELD(request_row, word, 'u'),       FIELD(request_row, place, 'u'),
    FIELD(request_row, round, 'i'),      FIELD(request_row, offered_ns, 'u'),
    FIELD(request_row, offered, 'u'),    FIELD(request_row, first_cell, 'u'),
    FIELD(request_row, first_unit, 'u'), FIELD(request_row, data_bytes, 'u'),
    FIELD(request_row, data_crc, 'u'),   FIELD(request_row, group_size, 'u'),
    FIELD(request_row, need, 'u'),       FIELD(request_row, id_bytes, 'u'),
    FIELD(request_row, split, 'u'), FIELD(request_row, level, 'u'),
    FIELD(request_row, crc, 'u'),        FIELD(request_row, next, 'u'),
    FIELD(request_row, returned, 'u'),   FIELD(request_row, admitted, 'u'),
    FIELD(request_row, ended_done, 'u'), FIELD(request_row, ended_given_up, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note cell_fields[] = {
    FIELD(request_cell, claim, 'u'),
    FIELD(request_cell, commit, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note journal_fields[] = {
    FIELD(relay_journal, writer, 'u'),      FIELD(relay_journal, slot, 'u'),
    FIELD(relay_journal, batch, 'u'),       FIELD(relay_journal, incarnation, 'u'),
    FIELD(relay_journal, source_incarnation, 'u'), FIELD(relay_journal, term, 'i'),
    FIELD(relay_journal, ended, 'u'),       FIELD(relay_journal, seen_ns, 'u'),
    FIELD(relay_journal, figures, 'V'),     FIELD(relay_journal, sources, 'V'),
    {NULL, 0, 0, 0},
};

static const struct field_note entry_fields[] = {
    FIELD(relay_entry, word, 'u'),   FIELD(relay_entry, producer_id, 'u'),
    FIELD(relay_entry, sequence, 'u'), FIELD(relay_entry, writer, 'u'),
    FIELD(relay_entry, commit, 'u'), FIELD(relay_entry, ended, 'u'),
    {NULL, 0, 0, 0},
};

static const struct {
    const char *name;
    const struct field_note *fields;
    size_t bytes;
} structs[] = {
    {"lead_table", lead_fields, sizeof(struct lead_table)},
    {"relay_journal", journal_fields, sizeof(struct relay_journal)},
    {"relay_entry", entry_fields, sizeof(struct relay_entry)},
    {"request_lane", lane_fields, sizeof(struct request_lane)},
    {"request_row", row_fields, sizeof(struct request_row)},
    {"request_cell", cell_fields, sizeof(struct request_cell)},
};

static bool append(PyObject *list, PyObject *item) {
    bool added = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return added;
}

static PyObject *describe(const struct field_note *fields, size_t bytes) {
    PyObject *names = PyList_New(0), *formats = PyList_New(0), *offsets = PyList_New(0);
    bool good = names != NULL && formats != NULL && offsets != NULL;
    for (const struct field_note *f = fields; good && f->name != NULL; f++) {
        good = append(names, PyUnicode_FromString(f->name)) &&
               append(formats, PyUnicode_FromFormat(f->kind == 'V' ? "%c%zu" : "<%c%zu", f->kind,
                                              f->bytes)) &&
               append(offsets, PyLong_FromSize_t(f->offset));
    }
    PyObject *result = good ? Py_BuildValue("{s:O,s:O,s:O,s:n}", "names", names, "formats", formats,
                                            "offsets", offsets, "itemsize", (Py_ssize_t)bytes)
                            : NULL;
    Py_XDECREF(names);
    Py_XDECREF(formats);
    Py_XDECREF(offsets);
    return result;
}

/* request_layout() -> {struct: {"names", "formats", "offsets", "itemsize"}}, as layout(). */
static PyObject *py_request_layout(PyObject *module, PyObject *ignored) {
    (void)module;
    (void)ignored;
    PyObject *result = PyDict_New();
    for (size_t i = 0; i < sizeof structs / sizeof *structs && result != NULL; i++) {
        PyObject *entry = describe(structs[i].fields, structs[i].bytes);
        if (entry == NULL || PyDict_SetItemString(result, structs[i].name, entry) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(entry);
    }
    return result;
}

/* request_divide(bytes) -> {"rows", "row_count", "cells", "units", "unit_count"}: offsets from the
 * lane's beginning, and counts; None where the bytes are too few. */
static PyObject *py_request_divide(PyObject *module, PyObject *argument) {
    (void)module;
    unsigned long long bytes = PyLong_AsUnsignedLongLong(argument);
    if (bytes == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    struct request_parts parts;
    static uint8_t at[1]; /* never dereferenced: offsets from it are all that is used */
    if (bytes > SHMBUS_REQUEST_MAX_BYTES + SHMBUS_PAGE || !request_divide(&parts, at, bytes)) {
        Py_RETURN_NONE;
    }
    uintptr_t base = (uintptr_t)at;
    return Py_BuildValue("{s:K,s:I,s:K,s:K,s:I}", "rows",
                         (unsigned long long)((uintptr_t)parts.rows - base), "row_count",
                         parts.row_count, "cells",
                         (unsigned long long)((uintptr_t)parts.cells - base), "units",
                         (unsigned long long)((uintptr_t)parts.units - base), "unit_count",
                         parts.unit_count);
}

static PyMethodDef functions[] = {
    {"request_layout", py_request_layout, METH_NOARGS, NULL},
    {"request_divide", py_request_divide, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool py_request_layout_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
