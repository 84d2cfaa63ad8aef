/* A declared schema, as what is put is checked against it. */
#ifndef SHMBUS_PYTHON_DECLARED_H
#define SHMBUS_PYTHON_DECLARED_H

#include "python/binding.h"
#include "batch/element.h"
#include "ring/declared_schema.h"

/* What numbers are stored as in arrays of a dtype. */
enum stored_kind py_stored_kind(PyArray_Descr *dtype);

typedef struct {
    PyObject_HEAD
    PyObject *encoded; /* bytes: what `parsed` points into */
    PyObject *names;   /* tuple of str, interned */
    PyObject *dimension_names; /* tuple of str */
    uint64_t required;         /* a bit a field */
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    uint8_t kinds[SHMBUS_MAX_FIELDS]; /* enum stored_kind */
    uint64_t any_shape;               /* a bit a field */
    uint8_t ndim[SHMBUS_MAX_FIELDS];
    int64_t *dimensions[SHMBUS_MAX_FIELDS]; /* as parsed, in `room` */
    int64_t *room;
    struct declared_fields parsed;
} DeclaredSchemaObject;
extern PyTypeObject DeclaredSchemaType;

/* For a name that is not at its own place: its field, -1 with an exception. */
int py_declared_find(const DeclaredSchemaObject *self, PyObject *name);
bool py_declared_refuse_missing(const DeclaredSchemaObject *self, uint64_t missing);

/* In place of a declared field: the row lengths, which every schema has room for. */
#define DECLARED_BY_THE_CORE 0xff
_Static_assert(SHMBUS_MAX_FIELDS <= DECLARED_BY_THE_CORE, "it is no field's number");

/* Which declared field each name is; false with an exception where one is unknown, or a field that
 * is required is not among them. */
static inline bool py_declared_match(const DeclaredSchemaObject *self, PyObject *const *names,
                                     uint32_t count, uint8_t *fields) {
    uint64_t given = 0;
    for (uint32_t i = 0; i < count; i++) {
        /* Mostly in the order of the declaration. */
        bool in_place = i < self->parsed.count && PyTuple_GET_ITEM(self->names, i) == names[i];
        int field = in_place ? (int)i : py_declared_find(self, names[i]);
        if (field < 0) {
            return false;
        }
        fields[i] = (uint8_t)field;
        given |= field == DECLARED_BY_THE_CORE ? 0 : UINT64_C(1) << field;
    }
    uint64_t missing = self->required & ~given;
    return missing == 0 || py_declared_refuse_missing(self, missing);
}

/* The sizes that names of dimensions have in one record. */
struct declared_bindings {
    uint64_t bound; /* a bit a name */
    uint64_t sizes[SHMBUS_MAX_DIMENSION_NAMES];
    uint8_t fields[SHMBUS_MAX_DIMENSION_NAMES]; /* that said so */
};
bool py_declared_refuse_shape(const DeclaredSchemaObject *self,
                              const struct declared_bindings *bindings, uint32_t field, int ndim,
                              const uint64_t *sizes);
/* Whether a field may have these sizes beside those before it; false with an exception. */
static inline bool py_declared_fits(const DeclaredSchemaObject *self,
                                    struct declared_bindings *bindings, uint32_t field, int ndim,
                                    const uint64_t *sizes) {
    if (self->any_shape >> field & 1) {
        return true;
    }
    bool fits = ndim == self->ndim[field];
    for (int d = 0; fits && d < ndim; d++) {
        int64_t wanted = self->dimensions[field][d];
        if (wanted >= 0) {
            fits = sizes[d] == (uint64_t)wanted;
        } else if (wanted <= SHMBUS_DIMENSION_NAMED) {
            int64_t name = SHMBUS_DIMENSION_NAMED - wanted;
            if (bindings->bound >> name & 1) {
                fits = sizes[d] == bindings->sizes[name];
            } else {
                bindings->bound |= UINT64_C(1) << name;
                bindings->sizes[name] = sizes[d];
                bindings->fields[name] = (uint8_t)field;
            }
        }
    }
    return fits || py_declared_refuse_shape(self, bindings, field, ndim, sizes);
}
/* The sizes of an empty list, of which its first is known: of the others what is declared. */
int py_declared_complete(const DeclaredSchemaObject *self, uint32_t field, int ndim,
                         uint64_t sizes[SHMBUS_MAX_NDIM]);
/* Whether arrays of a dtype are what the field has, without a conversion. */
bool py_declared_has_dtype(const DeclaredSchemaObject *self, uint32_t field,
                           PyArray_Descr *dtype);

bool py_declared_add_functions(PyObject *module);

#endif
