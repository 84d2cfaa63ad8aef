/* A declared schema, used to check every put.
 *
 * Invariants: the schema was bounds-checked once, at parsing. A check allocates only on failure;
 * its message names the field, the declaration and the actual value. */
#include "python/record/record.h"

#include "python/hooks.h"

bool py_declared_refuse_missing(const DeclaredSchemaObject *self, uint64_t missing) {
    return py_refuse(PyExc_TypeError,
                     "missing the field %R, which the schema requires; give it, or declare it as "
                     "\"%U?\" if samples may lack it",
                     PyTuple_GET_ITEM(self->names, __builtin_ctzll(missing)),
                     PyTuple_GET_ITEM(self->names, __builtin_ctzll(missing)));
}

static bool is_shared(PyObject *name) {
    const char *text = PyUnicode_AsUTF8(name);
    if (text == NULL) {
        PyErr_Clear();
        return false;
    }
    return strncmp(text, SHMBUS_SHARED_PREFIX, sizeof SHMBUS_SHARED_PREFIX - 1) == 0;
}

int py_declared_find(const DeclaredSchemaObject *self, PyObject *name) {
    int field = py_find_name(self->names, self->parsed.count, name);
    if (field < 0 && (PyUnicode_CompareWithASCIIString(name, SHMBUS_ROW_LENGTHS) == 0 ||
                      is_shared(name))) {
        return DECLARED_BY_THE_CORE;
    }
    if (field < 0) {
        py_raise_hook(hooks.unknown_field, Py_BuildValue("(OO)", name, self->names));
    }
    return field;
}

/* A new reference to the declared dimensions as text; NULL with an exception. */
static PyObject *shape_text(const DeclaredSchemaObject *self, uint32_t field) {
    const struct declared_field *declared = &self->parsed.fields[field];
    PyObject *shape = PyTuple_New(declared->ndim);
    for (uint32_t d = 0; shape != NULL && d < declared->ndim; d++) {
        int64_t size = declared_schema_dimension(declared, d);
        py_tuple_set(&shape, d,
                     size == SHMBUS_DIMENSION_FREE ? Py_NewRef(Py_None)
                     : size >= 0                   ? PyLong_FromLongLong(size)
                                 : Py_NewRef(PyTuple_GET_ITEM(self->dimension_names,
                                                              SHMBUS_DIMENSION_NAMED - size)));
    }
    return shape;
}

bool py_declared_refuse_shape(const DeclaredSchemaObject *self,
                              const struct declared_bindings *bindings, uint32_t field, int ndim,
                              const uint64_t *sizes, int at) {
    const struct declared_field *declared = &self->parsed.fields[field];
    int64_t size = at < 0 ? 0 : declared_schema_dimension(declared, (uint32_t)at);
    int64_t name = SHMBUS_DIMENSION_NAMED - size; /* negative for a dimension without a name */
    PyObject *wanted = shape_text(self, field);
    PyObject *got = py_sizes(sizes, ndim);
    if (wanted != NULL && got != NULL && name >= 0) {
        PyErr_Format(PyExc_ValueError,
                     "%U: expected the shape %R with %U = %llu, as %U has it, got %R",
                     PyTuple_GET_ITEM(self->names, field), wanted,
                     PyTuple_GET_ITEM(self->dimension_names, name), U64(bindings->sizes[name]),
                     PyTuple_GET_ITEM(self->names, bindings->fields[name]), got);
    } else if (wanted != NULL && got != NULL) {
        PyErr_Format(PyExc_ValueError, "%U: expected the shape %R, got %R",
                     PyTuple_GET_ITEM(self->names, field), wanted, got);
    }
    Py_XDECREF(wanted);
    Py_XDECREF(got);
    return false;
}

int py_declared_complete(const DeclaredSchemaObject *self, uint32_t field, int ndim,
                         uint64_t sizes[SHMBUS_MAX_NDIM]) {
    const struct declared_field *declared = &self->parsed.fields[field];
    if (ndim == 0 || sizes[ndim - 1] != 0) {
        return ndim;
    }
    for (; ndim < declared->ndim; ndim++) {
        int64_t size = declared_schema_dimension(declared, (uint32_t)ndim);
        sizes[ndim] = size >= 0 ? (uint64_t)size : 0;
    }
    return ndim;
}

/* ---- The type ---- */

static bool take_names(DeclaredSchemaObject *self) {
    const struct declared_fields *parsed = &self->parsed;
    self->names = PyTuple_New(parsed->count);
    self->dimension_names = PyTuple_New(parsed->dimension_names);
    if (self->names == NULL || self->dimension_names == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < parsed->count; i++) {
        PyObject *name =
            PyUnicode_DecodeUTF8(parsed->fields[i].name, parsed->fields[i].name_bytes, "strict");
        if (name == NULL) {
            return false;
        }
        PyUnicode_InternInPlace(&name);
        PyTuple_SET_ITEM(self->names, i, name);
    }
    for (uint32_t i = 0; i < parsed->dimension_names; i++) {
        PyObject *name = PyUnicode_DecodeUTF8((const char *)parsed->names[i] + 1,
                                              parsed->names[i][0], "strict");
        if (name == NULL) {
            return false;
        }
        PyTuple_SET_ITEM(self->dimension_names, i, name);
    }
    return true;
}

static bool take_dtype(DeclaredSchemaObject *self, uint32_t i) {
    const struct declared_field *field = &self->parsed.fields[i];
    self->dtypes[i] = py_decode_dtype(PyTuple_GET_ITEM(self->names, i), field->dtype,
                                      field->dtype_bytes, field->itemsize);
    if (self->dtypes[i] == NULL) {
        return false;
    }
    self->kinds[i] = (uint8_t)py_stored_kind(self->dtypes[i]);
    if ((field->flags & SHMBUS_DECLARED_OPTIONAL) == 0) {
        self->required |= UINT64_C(1) << i;
    }
    return true;
}

static PyObject *py_declared_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *encoded;
    if (!PyArg_ParseTuple(args, "S", &encoded)) {
        return NULL;
    }
    DeclaredSchemaObject *self = (DeclaredSchemaObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->encoded = Py_NewRef(encoded);
    if (PyBytes_GET_SIZE(encoded) > (Py_ssize_t)SHMBUS_DECLARED_BYTES ||
        !declared_schema_parse((const uint8_t *)PyBytes_AS_STRING(encoded),
                               (uint32_t)PyBytes_GET_SIZE(encoded), &self->parsed)) {
        PyErr_SetString(PyExc_ValueError, "these bytes are no declared schema");
        Py_DECREF(self);
        return NULL;
    }
    bool taken = take_names(self);
    for (uint32_t i = 0; taken && i < self->parsed.count; i++) {
        taken = take_dtype(self, i);
    }
    if (!taken) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void py_declared_dealloc(DeclaredSchemaObject *self) {
    for (uint32_t i = 0; i < SHMBUS_MAX_FIELDS; i++) {
        Py_XDECREF(self->dtypes[i]);
    }
    Py_XDECREF(self->names);
    Py_XDECREF(self->dimension_names);
    Py_XDECREF(self->encoded);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* fields() -> [(name, dtype, shape or None if free, required)] */
static PyObject *py_declared_list(DeclaredSchemaObject *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *found = PyList_New(0);
    for (uint32_t i = 0; found != NULL && i < self->parsed.count; i++) {
        const struct declared_field *field = &self->parsed.fields[i];
        PyObject *shape = field->flags & SHMBUS_DECLARED_ANY_SHAPE ? Py_NewRef(Py_None)
                                                                   : shape_text(self, i);
        py_list_add(&found,
                    shape == NULL
                        ? NULL
                        : Py_BuildValue("(OONO)", PyTuple_GET_ITEM(self->names, i), self->dtypes[i],
                                        shape, self->required >> i & 1 ? Py_True : Py_False));
    }
    return found;
}

/* dtype(name) -> numpy.dtype, or None for an unknown field. */
static PyObject *py_declared_dtype(DeclaredSchemaObject *self, PyObject *name) {
    int field = py_find_name(self->names, self->parsed.count, name);
    return Py_NewRef(field < 0 ? Py_None : (PyObject *)self->dtypes[field]);
}

static PyMethodDef declared_methods[] = {
    METHOD("fields", py_declared_list, METH_NOARGS, NULL),
    METHOD("dtype", py_declared_dtype, METH_O, NULL),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef declared_members[] = {
    {"encoded", T_OBJECT_EX, offsetof(DeclaredSchemaObject, encoded), READONLY, NULL},
    {"names", T_OBJECT_EX, offsetof(DeclaredSchemaObject, names), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject DeclaredSchemaType = {
    TYPE_BASICS("DeclaredSchema", DeclaredSchemaObject, py_declared_dealloc, 0),
    .tp_methods = declared_methods,
    .tp_members = declared_members,
    .tp_new = py_declared_new,
};

/* declared_bytes(part) -> bytes or None, from a Segment or from the bytes of the part read from its
 * file; ValueError for a damaged part. */
PyObject *py_declared_bytes(PyObject *Py_UNUSED(module), PyObject *source) {
    struct declared_part *part = NULL, *copy = NULL;
    if (PyObject_TypeCheck(source, &SegmentType)) {
        if (!py_segment_usable((SegmentObject *)source, "handle")) {
            return NULL;
        }
        part = ((SegmentObject *)source)->c.declared;
    } else if (PyBytes_Check(source) && PyBytes_GET_SIZE(source) == sizeof *part) {
        part = copy = PyMem_Malloc(sizeof *copy); /* aligned */
        if (copy != NULL) {
            memcpy(copy, PyBytes_AS_STRING(source), sizeof *copy);
        }
    } else {
        return PyErr_Format(PyExc_TypeError, "expected a Segment, or the bytes of a declared part");
    }
    uint8_t *text = part == NULL ? NULL : PyMem_Malloc(SHMBUS_DECLARED_BYTES);
    PyObject *found = NULL;
    if (text == NULL) {
        PyErr_NoMemory();
    } else {
        uint32_t bytes;
        enum declared_status status = declared_schema_read(part, text, &bytes);
        if (status == DECLARED_DAMAGED) {
            PyErr_SetString(PyExc_ValueError, "the declared schema is damaged");
        } else {
            found = status == DECLARED_NONE
                        ? Py_NewRef(Py_None)
                        : PyBytes_FromStringAndSize((const char *)text, (Py_ssize_t)bytes);
        }
    }
    PyMem_Free(text);
    PyMem_Free(copy);
    return found;
}
