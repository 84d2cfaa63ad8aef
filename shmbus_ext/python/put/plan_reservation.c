/* What a reservation is to have room for (see plan_reservation.h).
 *
 * Invariant: nothing is taken from the ring here. */
#include "python/put/plan_reservation.h"

#include "python/hooks.h"

/* Sizes of the fields into the arguments, as put takes them from arrays. */
static bool take_shapes(struct put_arguments *arguments, const struct field_list *fields,
                        uint64_t limit) {
    uint32_t words = 0;
    Py_ssize_t count = PyTuple_GET_SIZE(fields->names);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *shape = PyTuple_GET_ITEM(fields->shapes, i);
        Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
        if (!py_arguments_shape_fits(PyTuple_GET_ITEM(fields->names, i), words, ndim)) {
            return false;
        }
        uint64_t bytes =
            (uint64_t)PyDataType_ELSIZE((PyArray_Descr *)PyTuple_GET_ITEM(fields->dtypes, i));
        double estimate = (double)bytes;
        arguments->field_ndim[i] = (uint8_t)ndim;
        words++;
        for (Py_ssize_t d = 0; d < ndim; d++) {
            uint64_t size = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, d));
            if (PyErr_Occurred()) {
                return false;
            }
            estimate *= (double)size;
            bytes *= size;
            arguments->shape[words++] = size;
        }
        /* A product that overflows is above any limit, and must stay so. */
        arguments->field_bytes[i] = estimate > (double)limit ? limit + 1 : bytes;
    }
    arguments->spec.shape_words = words;
    return true;
}

bool py_check_declared(const DeclaredSchemaObject *declared, PyObject *const *names,
                       PyArray_Descr *const *dtypes, uint32_t count, const uint8_t *ndim,
                       const uint64_t *shape) {
    uint8_t fields[SHMBUS_MAX_FIELDS];
    struct declared_bindings bindings;
    bindings.bound = 0;
    if (!py_declared_match(declared, names, count, fields)) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (fields[i] == DECLARED_BY_THE_CORE) {
            shape += 1 + ndim[i];
            continue;
        }
        if (!py_declared_has_dtype(declared, fields[i], dtypes[i])) {
            PyObject *wanted = py_dtype_text(declared->dtypes[fields[i]]);
            PyObject *got = py_dtype_text(dtypes[i]);
            if (wanted != NULL && got != NULL) {
                PyErr_Format(PyExc_TypeError, "%U: expected %U, as the schema has it, got %U",
                             names[i], wanted, got);
            }
            Py_XDECREF(wanted);
            Py_XDECREF(got);
            return false;
        }
        if (!py_declared_fits(declared, &bindings, fields[i], ndim[i], shape + 1)) {
            return false;
        }
        shape += 1 + ndim[i];
    }
    return true;
}

bool py_plan_reservation(WriterObject *self, struct put_arguments *arguments, PyObject *head,
                         const struct field_list *fields, uint64_t meta_room) {
    PyArray_Descr *dtypes[SHMBUS_MAX_FIELDS];
    PyObject *names[SHMBUS_MAX_FIELDS];
    struct record_spec *spec = &arguments->spec;
    Py_ssize_t count = PyTuple_GET_SIZE(fields->names);
    if (!py_arguments_take_mapping(arguments, head) || !py_arguments_finish_head(arguments)) {
        return false;
    }
    if (count > (Py_ssize_t)SHMBUS_MAX_FIELDS || PyTuple_GET_SIZE(fields->dtypes) != count ||
        PyTuple_GET_SIZE(fields->shapes) != count) {
        PyErr_Format(PyExc_ValueError, "fields: expected at most %u, got %zd", SHMBUS_MAX_FIELDS,
                     count);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        names[i] = PyTuple_GET_ITEM(fields->names, i);
        dtypes[i] = (PyArray_Descr *)PyTuple_GET_ITEM(fields->dtypes, i);
    }
    if (!take_shapes(arguments, fields, self->segment->c.record_limit)) {
        return false;
    }
    arguments->declared = Py_XNewRef((PyObject *)self->declared);
    if (self->declared != NULL &&
        !py_check_declared(self->declared, names, dtypes, (uint32_t)count, arguments->field_ndim,
                           arguments->shape)) {
        return false;
    }
    spec->field_count = (uint32_t)count;
    spec->shape = arguments->shape;
    spec->field_bytes = arguments->field_bytes;
    spec->field_ndim = arguments->field_ndim;
    arguments->schema =
        py_schema_cache_find(&self->schemas, spec, names, dtypes, arguments->field_ndim);
    if (arguments->schema == NULL) {
        return false;
    }
    spec->meta_bytes = meta_room > spec->meta_bytes ? meta_room : spec->meta_bytes;
    if (!record_plan(spec)) {
        PyErr_SetString(hooks.too_large_error, "the reservation is larger than any record");
        return false;
    }
    return true;
}
