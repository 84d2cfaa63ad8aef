/* The tables of layout_tables.h: each shared field by name, offset, size and kind.
 *
 * Invariant: no number is written down here; the compiler fills them in from layout.h. */
#include "python/segment/layout_tables.h"

#include "ring/layout.h"

struct field_note {
    const char *name;
    size_t offset;
    size_t bytes;
    char kind; /* as numpy has it: u, i, f, S, V */
};

#define NAMED(name, type, field, kind)                                                        \
    {name, offsetof(struct type, field), sizeof(((struct type *)0)->field), kind}
#define FIELD(type, field, kind) NAMED(#field, type, field, kind)

static const struct field_note header_fields[] = {
    FIELD(bus_header, magic, 'u'),
    FIELD(bus_header, layout_version, 'u'),
    FIELD(bus_header, layout_hash, 'u'),
    FIELD(bus_header, segment_bytes, 'u'),
    FIELD(bus_header, data_offset, 'u'),
    FIELD(bus_header, extent_bytes, 'u'),
    FIELD(bus_header, extent_count, 'u'),
    FIELD(bus_header, max_producers, 'u'),
    FIELD(bus_header, created_unix_ns, 'u'),
    FIELD(bus_header, geometry_crc, 'u'),
    FIELD(bus_header, bell, 'u'),
    NAMED("space_bell", bus_header, space_bell.count, 'u'),
    NAMED("space_wanted", bus_header, space_bell.wanted, 'u'),
    FIELD(bus_header, next_producer_id, 'u'),
    FIELD(bus_header, attach_epoch, 'u'),
    FIELD(bus_header, policy_version, 'i'),
    FIELD(bus_header, consumer_packs, 'u'),
    FIELD(bus_header, collector_pid, 'u'),
    FIELD(bus_header, collector_leased_groups, 'u'),
    FIELD(bus_header, collector_leased_records, 'u'),
    FIELD(bus_header, collector_stashed_groups, 'u'),
    FIELD(bus_header, collector_stashed_records, 'u'),
    FIELD(bus_header, collector_seen_ns, 'u'),
    FIELD(bus_header, collector_lease_ns, 'u'),
    FIELD(bus_header, collector_label, 'S'),
    FIELD(bus_header, intent_count, 'u'),
    FIELD(bus_header, intent_reason, 'u'),
    FIELD(bus_header, intent_base, 'u'),
    FIELD(bus_header, intent_crc, 'u'),
    FIELD(bus_header, intent_split, 'u'),
    FIELD(bus_header, intent_split_base, 'u'),
    FIELD(bus_header, free_span, 'u'),
    FIELD(bus_header, free_first, 'u'),
    FIELD(bus_header, paused, 'u'),
    FIELD(bus_header, pause_policy_version, 'i'),
    FIELD(bus_header, pause_unix_ns, 'u'),
    FIELD(bus_header, pause_reason, 'S'),
    FIELD(bus_header, retries_open, 'u'),
    FIELD(bus_header, groups_failed, 'u'),
    FIELD(bus_header, next_round, 'u'),
    FIELD(bus_header, cancelled_count, 'u'),
    FIELD(bus_header, leased_in_part, 'u'),
    FIELD(bus_header, identity, 'V'),
    FIELD(bus_header, ancestors, 'V'),
    {NULL, 0, 0, 0},
};

static const struct field_note slot_fields[] = {
    FIELD(producer_slot, committed, 'u'),
    FIELD(producer_slot, aborted, 'u'),
    FIELD(producer_slot, first, 'u'),
    FIELD(producer_slot, current, 'u'),
    FIELD(producer_slot, next_order, 'u'),
    FIELD(producer_slot, producer_id, 'u'),
    FIELD(producer_slot, state, 'u'),
    FIELD(producer_slot, pid, 'u'),
    FIELD(producer_slot, label, 'S'),
    FIELD(producer_slot, committing, 'u'),
    FIELD(producer_slot, commit_ref, 'u'),
    FIELD(producer_slot, commit_generation, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note extent_fields[] = {
    FIELD(extent_desc, word, 'u'),   FIELD(extent_desc, order, 'u'),
    FIELD(extent_desc, used, 'u'),   FIELD(extent_desc, next, 'u'),
    FIELD(extent_desc, span, 'u'),   FIELD(extent_desc, sealed, 'u'),
    FIELD(extent_desc, writer_pins, 'u'), FIELD(extent_desc, producer_id, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note retry_fields[] = {
    FIELD(retry_entry, claim, 'u'),      FIELD(retry_entry, number, 'u'),
    FIELD(retry_entry, round, 'i'),      FIELD(retry_entry, asked_ns, 'u'),
    FIELD(retry_entry, group_size, 'u'), FIELD(retry_entry, index, 'u'),
    FIELD(retry_entry, attempt, 'u'),    FIELD(retry_entry, id_bytes, 'u'),
    FIELD(retry_entry, reason_bytes, 'u'), FIELD(retry_entry, need, 'u'),
    FIELD(retry_entry, split, 'u'),       FIELD(retry_entry, crc, 'u'),
    FIELD(retry_entry, id, 'S'),         FIELD(retry_entry, reason, 'S'),
    {NULL, 0, 0, 0},
};

static const struct field_note split_fields[] = {
    FIELD(split_entry, label, 'S'),        FIELD(split_entry, acked, 'u'),
    FIELD(split_entry, dropped, 'u'),      FIELD(split_entry, stashed, 'u'),
    FIELD(split_entry, ready_groups, 'u'), FIELD(split_entry, open_groups, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note schema_fields[] = {
    FIELD(schema_entry, name_bytes, 'u'),
    FIELD(schema_entry, dtype_bytes, 'u'),
    FIELD(schema_entry, itemsize, 'u'),
    FIELD(schema_entry, ndim, 'u'),
    {NULL, 0, 0, 0},
};

static const struct field_note declared_fields[] = {
    FIELD(declared_part, bytes, 'u'), FIELD(declared_part, crc, 'u'),
    FIELD(declared_part, text, 'S'),  {NULL, 0, 0, 0},
};

static const struct field_note declared_entry_fields[] = {
    FIELD(declared_entry, name_bytes, 'u'), FIELD(declared_entry, dtype_bytes, 'u'),
    FIELD(declared_entry, itemsize, 'u'),   FIELD(declared_entry, ndim, 'u'),
    FIELD(declared_entry, flags, 'u'),      {NULL, 0, 0, 0},
};

static const struct field_note begun_fields[] = {
    FIELD(begun_row, owner, 'u'), FIELD(begun_row, key, 'u'),
    FIELD(begun_row, begun_ns, 'u'), FIELD(begun_row, index, 'u'),
    {NULL, 0, 0, 0},
};

static const struct {
    const char *name;
    const struct field_note *fields;
    size_t bytes;
} structs[] = {
    {"bus_header", header_fields, sizeof(struct bus_header)},
    {"producer_slot", slot_fields, sizeof(struct producer_slot)},
    {"extent_desc", extent_fields, sizeof(struct extent_desc)},
    {"retry_entry", retry_fields, sizeof(struct retry_entry)},
    {"split_entry", split_fields, sizeof(struct split_entry)},
    {"schema_entry", schema_fields, sizeof(struct schema_entry)},
    {"declared_part", declared_fields, sizeof(struct declared_part)},
    {"begun_row", begun_fields, sizeof(struct begun_row)},
    {"declared_entry", declared_entry_fields, sizeof(struct declared_entry)},
};

static bool add_field(PyObject *names, PyObject *formats, PyObject *offsets,
                      const struct field_note *field) {
    PyObject *name = PyUnicode_FromString(field->name);
    PyObject *format = PyUnicode_FromFormat(field->kind == 'S' || field->kind == 'V' ? "%c%zu"
                                                                                      : "<%c%zu",
                                            field->kind, field->bytes);
    PyObject *offset = PyLong_FromSize_t(field->offset);
    bool added = name != NULL && format != NULL && offset != NULL &&
                 PyList_Append(names, name) == 0 && PyList_Append(formats, format) == 0 &&
                 PyList_Append(offsets, offset) == 0;
    Py_XDECREF(name);
    Py_XDECREF(format);
    Py_XDECREF(offset);
    return added;
}

PyObject *py_layout(PyObject *module, PyObject *ignored) {
    (void)module;
    (void)ignored;
    PyObject *result = PyDict_New();
    for (size_t i = 0; i < sizeof structs / sizeof *structs && result != NULL; i++) {
        PyObject *names = PyList_New(0), *formats = PyList_New(0), *offsets = PyList_New(0);
        bool built = names != NULL && formats != NULL && offsets != NULL;
        for (const struct field_note *f = structs[i].fields; built && f->name != NULL; f++) {
            built = add_field(names, formats, offsets, f);
        }
        PyObject *entry =
            built ? Py_BuildValue("{s:O,s:O,s:O,s:n}", "names", names, "formats", formats,
                                  "offsets", offsets, "itemsize", (Py_ssize_t)structs[i].bytes)
                  : NULL;
        if (entry == NULL || PyDict_SetItemString(result, structs[i].name, entry) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(entry);
        Py_XDECREF(names);
        Py_XDECREF(formats);
        Py_XDECREF(offsets);
    }
    return result;
}
