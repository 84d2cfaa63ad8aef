/* Schemas: which fields a record has, encoded once by a producer, parsed once by a consumer. */
#ifndef SHMBUS_PYTHON_SCHEMA_H
#define SHMBUS_PYTHON_SCHEMA_H

#include "batch/convert.h"
#include "python/binding.h"
#include "ring/record.h"

/* Encoded schemas of what this process puts, by identity of names and dtypes. */
struct schema_cache_entry {
    uint32_t count;
    PyObject *names[SHMBUS_MAX_FIELDS];
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    uint8_t ndim[SHMBUS_MAX_FIELDS];
    PyObject *encoded; /* bytes */
};
#define SCHEMA_CACHE_ENTRIES 8
struct schema_cache {
    struct schema_cache_entry entries[SCHEMA_CACHE_ENTRIES];
    unsigned next;
};
void py_schema_cache_clear(struct schema_cache *cache);
/* A new reference to the bytes that spec.schema then points into: the entry may go any time. */
PyObject *py_schema_cache_find(struct schema_cache *cache, struct record_spec *spec,
                               PyObject *const *names, PyArray_Descr *const *dtypes,
                               const uint8_t *ndim);

/* The fields of a record: parsed once for all records that look alike. */
typedef struct schema_object {
    PyObject_HEAD
    PyObject *encoded;
    PyObject *names; /* tuple of str */
    uint32_t count;
    uint8_t ndim[SHMBUS_MAX_FIELDS];
    uint16_t shape_at[SHMBUS_MAX_FIELDS]; /* word of the field's offset; its sizes follow */
    PyObject *dtype_names[SHMBUS_MAX_FIELDS];
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS]; /* resolved when first asked for */
    uint8_t kinds[SHMBUS_MAX_FIELDS];         /* enum element_kind */
} SchemaObject;
extern PyTypeObject SchemaType;
SchemaObject *py_schema_parse(const uint8_t *encoded, uint32_t bytes, uint32_t count);
/* -1 where there is no such field. */
int py_schema_find(const SchemaObject *self, PyObject *name);
PyArray_Descr *py_schema_dtype(SchemaObject *self, int field);
enum element_kind py_kind_of_dtype(const PyArray_Descr *dtype);
/* Whether they are one dtype; those that stand in for what NumPy lacks are so by their names. */
bool py_same_dtype(PyArray_Descr *one, PyArray_Descr *other);
/* As people read it, so that what stands in for bfloat16 is called that; NULL with an exception. */
PyObject *py_dtype_text(PyArray_Descr *dtype);

#endif
