/* Schemas: names, dtypes and dimensions of a record's fields. Encoded once for a producer's records
 * of equal layout, parsed once for a consumer's records.
 *
 * Invariant: a dtype serves a field only if its itemsize matches the itemsize of the bounds
 * check. */
#include "python/record/record.h"

#include "python/hooks.h"

/* ---- Schemas written by this process ---- */

static void entry_clear(struct schema_cache_entry *entry) {
    for (uint32_t i = 0; i < entry->count; i++) {
        Py_CLEAR(entry->names[i]);
        Py_CLEAR(entry->dtypes[i]);
    }
    Py_CLEAR(entry->encoded);
    entry->count = 0;
}

void py_schema_cache_clear(struct schema_cache *cache) {
    for (unsigned i = 0; i < SCHEMA_CACHE_ENTRIES; i++) {
        entry_clear(&cache->entries[i]);
    }
}

static bool append_field(uint8_t **out, uint8_t *end, PyObject *name, PyArray_Descr *dtype,
                         uint8_t ndim) {
    Py_ssize_t name_bytes, dtype_bytes;
    const char *text = PyUnicode_AsUTF8AndSize(name, &name_bytes);
    if (text == NULL) {
        return false;
    }
    PyObject *encoded = PyObject_CallFunctionObjArgs(hooks.encode_dtype, name, dtype, NULL);
    char *dtype_text;
    if (encoded == NULL || PyBytes_AsStringAndSize(encoded, &dtype_text, &dtype_bytes) < 0) {
        Py_XDECREF(encoded);
        return false;
    }
    bool fits = name_bytes >= 1 && name_bytes <= (Py_ssize_t)SHMBUS_MAX_NAME_BYTES &&
                dtype_bytes >= 1 && dtype_bytes <= (Py_ssize_t)SHMBUS_MAX_DTYPE_BYTES &&
                end - *out >= (Py_ssize_t)sizeof(struct schema_entry) + name_bytes + dtype_bytes;
    if (!fits) {
        PyErr_Format(PyExc_ValueError,
                     "field %R: expected a name of 1 to %u bytes and a dtype described in at most "
                     "%u",
                     name, SHMBUS_MAX_NAME_BYTES, SHMBUS_MAX_DTYPE_BYTES);
    } else {
        struct schema_entry entry = {.name_bytes = (uint16_t)name_bytes,
                                     .dtype_bytes = (uint16_t)dtype_bytes,
                                     .itemsize = (uint32_t)PyDataType_ELSIZE(dtype),
                                     .ndim = ndim};
        memcpy(*out, &entry, sizeof entry);
        memcpy(*out + sizeof entry, text, (size_t)name_bytes);
        memcpy(*out + sizeof entry + name_bytes, dtype_text, (size_t)dtype_bytes);
        *out += (Py_ssize_t)sizeof entry + name_bytes + dtype_bytes;
    }
    Py_DECREF(encoded);
    return fits;
}

static struct schema_cache_entry *entry_make(struct schema_cache *cache, uint32_t count,
                                             PyObject *const *names,
                                             PyArray_Descr *const *dtypes, const uint8_t *ndim) {
    uint8_t *encoded = PyMem_Malloc(SHMBUS_MAX_SCHEMA_BYTES);
    if (encoded == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    uint8_t *at = encoded;
    for (uint32_t i = 0; i < count; i++) {
        if (!append_field(&at, encoded + SHMBUS_MAX_SCHEMA_BYTES, names[i], dtypes[i], ndim[i])) {
            PyMem_Free(encoded);
            return NULL;
        }
    }
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)encoded, at - encoded);
    PyMem_Free(encoded);
    if (bytes == NULL) {
        return NULL;
    }
    struct schema_cache_entry *entry = &cache->entries[cache->next];
    cache->next = (cache->next + 1) % SCHEMA_CACHE_ENTRIES;
    entry_clear(entry);
    entry->count = count;
    entry->encoded = bytes;
    for (uint32_t i = 0; i < count; i++) {
        entry->names[i] = Py_NewRef(names[i]);
        entry->dtypes[i] = (PyArray_Descr *)Py_NewRef((PyObject *)dtypes[i]);
        entry->ndim[i] = ndim[i];
    }
    return entry;
}

static bool entry_matches(const struct schema_cache_entry *entry, uint32_t count,
                          PyObject *const *names, PyArray_Descr *const *dtypes,
                          const uint8_t *ndim) {
    if (entry->encoded == NULL || entry->count != count) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (entry->names[i] != names[i] || entry->dtypes[i] != dtypes[i] ||
            entry->ndim[i] != ndim[i]) {
            return false;
        }
    }
    return true;
}

PyObject *py_schema_cache_find(struct schema_cache *cache, struct record_spec *spec,
                               PyObject *const *names, PyArray_Descr *const *dtypes,
                               const uint8_t *ndim) {
    struct schema_cache_entry *found = NULL;
    for (unsigned i = 0; i < SCHEMA_CACHE_ENTRIES && found == NULL; i++) {
        if (entry_matches(&cache->entries[i], spec->field_count, names, dtypes, ndim)) {
            found = &cache->entries[i];
        }
    }
    if (found == NULL) {
        found = entry_make(cache, spec->field_count, names, dtypes, ndim);
    }
    if (found == NULL) {
        return NULL;
    }
    spec->schema = (const uint8_t *)PyBytes_AS_STRING(found->encoded);
    spec->schema_bytes = (uint32_t)PyBytes_GET_SIZE(found->encoded);
    return Py_NewRef(found->encoded);
}

/* ---- Dtypes ---- */

/* Encoded form of a dtype; NULL without an exception for an unencodable dtype, equal to no
 * other. */
static PyObject *described(PyArray_Descr *dtype) {
    PyObject *arguments = Py_BuildValue("(sO)", "dtype", (PyObject *)dtype);
    PyObject *text = arguments == NULL ? NULL : py_call_idempotent(hooks.encode_dtype, arguments);
    Py_XDECREF(arguments);
    if (text == NULL || !PyBytes_Check(text)) {
        PyErr_Clear();
        Py_CLEAR(text);
    }
    return text;
}

/* Call for a dtype without a name in NumPy, or for a substitute of such a dtype. */
static bool is_bfloat16(PyArray_Descr *dtype) {
    PyObject *text = described(dtype);
    bool found = text != NULL && strcmp(PyBytes_AS_STRING(text), "bfloat16") == 0;
    Py_XDECREF(text);
    return found;
}

enum stored_kind py_stored_kind(PyArray_Descr *dtype) {
    if (PyTypeNum_ISUSERDEF(dtype->type_num) || PyDataType_METADATA(dtype) != NULL) {
        return is_bfloat16(dtype) ? STORED_BF16 : STORED_OTHER;
    }
    if (dtype->byteorder == '>') {
        return STORED_OTHER;
    }
    npy_intp itemsize = PyDataType_ELSIZE(dtype);
    bool is_signed = dtype->kind == 'i';
    switch (dtype->kind) {
    case 'b':
        return STORED_BOOL;
    case 'i':
    case 'u':
        return itemsize == 1   ? (is_signed ? STORED_I8 : STORED_U8)
               : itemsize == 2 ? (is_signed ? STORED_I16 : STORED_U16)
               : itemsize == 4 ? (is_signed ? STORED_I32 : STORED_U32)
                               : (is_signed ? STORED_I64 : STORED_U64);
    case 'f':
        return itemsize == 2   ? STORED_F16
               : itemsize == 4 ? STORED_F32
               : itemsize == 8 ? STORED_F64
                               : STORED_OTHER;
    default:
        return STORED_OTHER;
    }
}

PyObject *py_dtype_text(PyArray_Descr *dtype) {
    PyObject *name = PyDataType_METADATA(dtype) == NULL ? NULL : described(dtype);
    PyObject *text = name != NULL
                         ? PyUnicode_FromString(PyBytes_AS_STRING(name))
                         : PyObject_Str((PyObject *)dtype);
    Py_XDECREF(name);
    return text;
}

bool py_same_dtype(PyArray_Descr *one, PyArray_Descr *other) {
    if (one == other) {
        return true;
    }
    if (PyDataType_METADATA(one) == NULL && PyDataType_METADATA(other) == NULL) {
        return PyArray_EquivTypes(one, other);
    }
    PyObject *first = described(one), *second = described(other);
    bool same = first != NULL && second != NULL &&
                strcmp(PyBytes_AS_STRING(first), PyBytes_AS_STRING(second)) == 0;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return same;
}

/* ---- Schemas read by this process ---- */

static enum element_kind kind_of_dtype(PyArray_Descr *dtype) {
    enum stored_kind kind = py_stored_kind(dtype);
    return kind <= STORED_F64 ? (enum element_kind)kind : ELEMENT_OTHER;
}
_Static_assert((int)STORED_F64 == (int)ELEMENT_F64, "both name these in one order");

SchemaObject *py_schema_parse(const uint8_t *encoded, uint32_t bytes, uint32_t count) {
    SchemaObject *self = PyObject_New(SchemaObject, &SchemaType);
    if (self == NULL) {
        return NULL;
    }
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->encoded = PyBytes_FromStringAndSize((const char *)encoded, bytes);
    self->names = PyTuple_New(count);
    if (self->encoded == NULL || self->names == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    /* record_read_body proved these bounds. */
    const uint8_t *at = encoded;
    uint32_t words = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct schema_entry entry;
        memcpy(&entry, at, sizeof entry);
        at += sizeof entry;
        PyObject *name = PyUnicode_DecodeUTF8((const char *)at, entry.name_bytes, "replace");
        at += entry.name_bytes + entry.dtype_bytes;
        if (name == NULL) {
            Py_DECREF(self);
            return NULL;
        }
        PyUnicode_InternInPlace(&name);
        PyTuple_SET_ITEM(self->names, i, name);
        self->ndim[i] = entry.ndim;
        self->shape_at[i] = (uint16_t)words;
        self->kinds[i] = ELEMENT_OTHER;
        self->count = i + 1;
        words += 1u + entry.ndim;
    }
    return self;
}

int py_find_name(PyObject *names, uint32_t count, PyObject *name) {
    for (uint32_t i = 0; i < count; i++) {
        if (PyTuple_GET_ITEM(names, i) == name) {
            return (int)i;
        }
    }
    for (uint32_t i = 0; i < count && PyUnicode_Check(name); i++) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), name) == 0) {
            return (int)i;
        }
    }
    return -1;
}

int py_schema_find(const SchemaObject *self, PyObject *name) {
    return py_find_name(self->names, self->count, name);
}

PyArray_Descr *py_decode_dtype(PyObject *name, const void *text, uint32_t bytes,
                               uint32_t itemsize) {
    PyObject *encoded = PyBytes_FromStringAndSize(text, (Py_ssize_t)bytes);
    PyObject *dtype =
        encoded == NULL ? NULL
                        : PyObject_CallFunctionObjArgs(hooks.decode_dtype, name, encoded, NULL);
    if (dtype != NULL && (!PyArray_DescrCheck(dtype) ||
                          (uint32_t)PyDataType_ELSIZE((PyArray_Descr *)dtype) != itemsize ||
                          PyDataType_REFCHK((PyArray_Descr *)dtype))) {
        PyErr_Format(PyExc_TypeError, "field %R: its dtype %R does not fit its itemsize %u", name,
                     encoded, itemsize);
        Py_CLEAR(dtype);
    }
    Py_XDECREF(encoded);
    return (PyArray_Descr *)dtype;
}

PyArray_Descr *py_schema_dtype(SchemaObject *self, int field) {
    if (self->dtypes[field] == NULL) {
        struct schema_entry entry;
        const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(self->encoded);
        for (int i = 0;; i++) {
            memcpy(&entry, at, sizeof entry);
            if (i == field) {
                break;
            }
            at += sizeof entry + entry.name_bytes + entry.dtype_bytes;
        }
        /* The bounds were proved for the itemsize of the record, not of the dtype. */
        self->dtypes[field] = py_decode_dtype(PyTuple_GET_ITEM(self->names, field),
                                              at + sizeof entry + entry.name_bytes,
                                              entry.dtype_bytes, entry.itemsize);
        if (self->dtypes[field] != NULL) {
            self->kinds[field] = (uint8_t)kind_of_dtype(self->dtypes[field]);
        }
    }
    return self->dtypes[field];
}

static void py_schema_dealloc(SchemaObject *self) {
    for (uint32_t i = 0; i < SHMBUS_MAX_FIELDS; i++) {
        Py_XDECREF(self->dtypes[i]);
    }
    Py_XDECREF(self->names);
    Py_XDECREF(self->encoded);
    PyObject_Free(self);
}

PyTypeObject SchemaType = {
    TYPE_BASICS("Schema", SchemaObject, py_schema_dealloc, 0),
};
