/* The fields of a put: matched with the declared schema, taken as arrays or lists, and planned.
 *
 * Invariants: a list keeps its place in `values` until it is written into the ring or converted.
 * Its sizes were read once; whoever reads its elements checks that they still are its sizes. */
#include "python/put/plan_fields.h"

#include "python/hooks.h"
#include "python/put/convert_lists.h"
#include "python/put/fill_lists.h"

/* Above what a record can hold: record_plan refuses it. */
#define BEYOND_A_RECORD ((UINT64_C(1) << 48) + 1)

/* The fields that every trainer reads have a dtype without a declaration. */
static struct {
    PyObject *name;
    PyArray_Descr *dtype;
    enum stored_kind kind;
} standard[4];

bool py_plan_fields_init(void) {
    const struct word_note words[] = {{&standard[0].name, "tokens"},
                                      {&standard[1].name, "loss_mask"},
                                      {&standard[2].name, "logprobs"},
                                      {&standard[3].name, "advantages"}};
    standard[0].dtype = PyArray_DescrFromType(NPY_INT32);
    standard[0].kind = STORED_I32;
    standard[1].dtype = PyArray_DescrFromType(NPY_UINT8);
    standard[1].kind = STORED_U8;
    standard[2].dtype = standard[3].dtype = PyArray_DescrFromType(NPY_FLOAT32);
    standard[2].kind = standard[3].kind = STORED_F32;
    return INTERN_WORDS(words);
}

bool py_plan_fields_add_constants(PyObject *module) {
    PyObject *dtypes = PyDict_New();
    for (size_t s = 0; dtypes != NULL && s < sizeof standard / sizeof *standard; s++) {
        if (PyDict_SetItem(dtypes, standard[s].name, (PyObject *)standard[s].dtype) < 0) {
            Py_CLEAR(dtypes);
        }
    }
    bool added = dtypes != NULL && PyModule_AddObjectRef(module, "STANDARD_DTYPES", dtypes) == 0;
    Py_XDECREF(dtypes);
    return added;
}

static PyObject *as_array(PyObject *name, PyObject *value, bool declared) {
    PyObject *array = PyObject_CallFunctionObjArgs(hooks.as_array, name, value,
                                                   declared ? Py_True : Py_False, NULL);
    if (array != NULL && !PyArray_Check(array)) {
        Py_CLEAR(array);
        PyErr_Format(PyExc_TypeError, "%U: expected an array", name);
    }
    return array;
}

/* What the elements of a list become; false with an exception where nothing says so. */
static bool choose_dtype(struct put_arguments *self, uint32_t i,
                         const DeclaredSchemaObject *declared, uint8_t field) {
    PyObject *name = self->names[i];
    if (declared != NULL) {
        self->dtypes[i] = declared->dtypes[field];
        self->kinds[i] = declared->kinds[field];
        if (self->kinds[i] == STORED_OTHER) {
            PyObject *wanted = py_dtype_text(self->dtypes[i]);
            if (wanted != NULL) {
                PyErr_Format(PyExc_TypeError,
                             "%U: expected an array of %U, got %.100s; lists become integers, "
                             "floats and bools only",
                             name, wanted, Py_TYPE(self->values[i])->tp_name);
                Py_DECREF(wanted);
            }
            return false;
        }
        return true;
    }
    for (size_t s = 0; s < sizeof standard / sizeof *standard; s++) {
        if (name == standard[s].name || PyUnicode_Compare(name, standard[s].name) == 0) {
            self->dtypes[i] = standard[s].dtype;
            self->kinds[i] = (uint8_t)standard[s].kind;
            return true;
        }
    }
    Py_XDECREF(as_array(name, self->values[i], false)); /* which says how to declare it */
    return false;
}

static uint64_t bytes_of(const uint64_t *sizes, int ndim, uint64_t itemsize) {
    double estimate = (double)itemsize;
    uint64_t bytes = itemsize;
    for (int d = 0; d < ndim; d++) {
        estimate *= (double)sizes[d];
        bytes *= sizes[d];
    }
    return estimate >= (double)BEYOND_A_RECORD ? BEYOND_A_RECORD : bytes;
}

/* A list, or a number for a field that has no dimension: its place is planned by its sizes. */
static bool plan_list(struct put_arguments *self, uint32_t i, uint32_t words,
                      const DeclaredSchemaObject *declared, uint8_t field) {
    uint64_t sizes[SHMBUS_MAX_NDIM];
    if (!choose_dtype(self, i, declared, field)) {
        return false;
    }
    int ndim = py_list_sizes(self->names[i], self->values[i], sizes);
    if (ndim < 0) {
        return false;
    }
    if (declared != NULL) {
        ndim = py_declared_complete(declared, field, ndim, sizes);
    }
    if (!py_arguments_shape_fits(self->names[i], words, ndim)) {
        return false;
    }
    self->field_ndim[i] = (uint8_t)ndim;
    self->field_bytes[i] = bytes_of(sizes, ndim, (uint64_t)PyDataType_ELSIZE(self->dtypes[i]));
    memcpy(self->shape + words + 1, sizes, (size_t)ndim * sizeof *sizes);
    self->list_count++;
    return true;
}

/* The dtype that is declared, where the array has another; false with an exception. */
static bool convert_dtype(struct put_arguments *self, uint32_t i,
                          const DeclaredSchemaObject *declared, uint8_t field) {
    PyArrayObject *array = self->arrays[i];
    PyArray_Descr *wanted = declared->dtypes[field];
    if (!py_declared_has_dtype(declared, field, PyArray_DESCR(array))) {
        PyArrayObject *converted =
            py_convert_array(self->names[i], array, wanted, declared->kinds[field]);
        if (converted == NULL) {
            return false;
        }
        Py_SETREF(self->arrays[i], converted);
    }
    return true;
}

/* An array as it is to be copied: made of the value, of the declared dtype, C-contiguous. */
static bool take_array(struct put_arguments *self, uint32_t i,
                       const DeclaredSchemaObject *declared, uint8_t field) {
    PyObject *value = self->values[i];
    PyObject *array;
    /* The hook refuses one number under a name that is nearly an argument's, and masked arrays. */
    if (PyArray_CheckExact(value) && PyArray_NDIM((PyArrayObject *)value) > 0) {
        array = Py_NewRef(value);
    } else {
        array = as_array(self->names[i], value, declared != NULL);
        if (array == NULL) {
            return false;
        }
    }
    self->arrays[i] = (PyArrayObject *)array;
    if (declared != NULL && !convert_dtype(self, i, declared, field)) {
        return false;
    }
    if (!PyArray_IS_C_CONTIGUOUS(self->arrays[i])) {
        PyObject *contiguous = PyArray_NewCopy(self->arrays[i], NPY_CORDER);
        if (contiguous == NULL) {
            return false;
        }
        Py_SETREF(self->arrays[i], (PyArrayObject *)contiguous);
    }
    self->dtypes[i] =
        declared != NULL ? declared->dtypes[field] : PyArray_DESCR(self->arrays[i]);
    return true;
}

/* Whether it is copied as it is: what most fields are. */
static inline bool is_plain(PyObject *value, const DeclaredSchemaObject *declared, uint8_t field) {
    return PyArray_CheckExact(value) && PyArray_NDIM((PyArrayObject *)value) > 0 &&
           PyArray_IS_C_CONTIGUOUS((PyArrayObject *)value) &&
           (declared == NULL ||
            PyArray_DESCR((PyArrayObject *)value) == declared->dtypes[field]);
}

/* The place of an array that is taken. */
static inline bool plan_array(struct put_arguments *self, uint32_t i, uint32_t words) {
    PyArrayObject *taken = self->arrays[i];
    int ndim = PyArray_NDIM(taken);
    if (words + (uint32_t)ndim >= SHMBUS_MAX_SHAPE_WORDS || ndim > (int)SHMBUS_MAX_NDIM) {
        return py_arguments_shape_fits(self->names[i], words, ndim);
    }
    self->field_ndim[i] = (uint8_t)ndim;
    self->field_bytes[i] = (uint64_t)PyArray_NBYTES(taken);
    uint64_t *sizes = self->shape + words + 1;
    const npy_intp *dims = PyArray_DIMS(taken);
    for (int d = 0; d < ndim; d++) {
        sizes[d] = (uint64_t)dims[d];
    }
    return true;
}

static bool is_one_number(PyObject *value) {
    return PyLong_Check(value) || PyFloat_Check(value);
}

static inline bool plan_field(struct put_arguments *self, uint32_t i, uint32_t words,
                              const DeclaredSchemaObject *declared, uint8_t field) {
    PyObject *value = self->values[i];
    if (is_plain(value, declared, field)) {
        self->arrays[i] = (PyArrayObject *)Py_NewRef(value);
        self->dtypes[i] = PyArray_DESCR(self->arrays[i]);
        return plan_array(self, i, words);
    }
    if (py_is_list(value) || (declared != NULL && is_one_number(value))) {
        return plan_list(self, i, words, declared, field);
    }
    return take_array(self, i, declared, field) && plan_array(self, i, words);
}

/* All fields of it, and the number of words that their shapes take. */
static bool plan_fields(struct put_arguments *self, uint32_t *words) {
    uint32_t at = 0;
    for (uint32_t i = 0; i < self->array_count; i++) {
        if (!plan_field(self, i, at, NULL, 0)) {
            return false;
        }
        at += 1u + self->field_ndim[i];
    }
    *words = at;
    return true;
}

static bool plan_declared_fields(struct put_arguments *self, DeclaredSchemaObject *declared,
                                 uint32_t *words) {
    uint8_t fields[SHMBUS_MAX_FIELDS];
    struct declared_bindings bindings;
    uint32_t at = 0;
    bindings.bound = 0;
    if (!py_declared_match(declared, self->names, self->array_count, fields)) {
        return false;
    }
    self->declared = Py_NewRef((PyObject *)declared); /* its dtypes are used to the end */
    for (uint32_t i = 0; i < self->array_count; i++) {
        if (fields[i] == DECLARED_BY_THE_CORE) {
            if (!plan_field(self, i, at, NULL, 0)) {
                return false;
            }
        } else if (!plan_field(self, i, at, declared, fields[i]) ||
            !py_declared_fits(declared, &bindings, fields[i], self->field_ndim[i],
                              self->shape + at + 1)) {
            return false;
        }
        at += 1u + self->field_ndim[i];
    }
    *words = at;
    return true;
}

bool py_arguments_shape_fits(PyObject *name, uint32_t words, Py_ssize_t ndim) {
    if (ndim > (Py_ssize_t)SHMBUS_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%U: expected at most %u dimensions, got %zd", name,
                     SHMBUS_MAX_NDIM, ndim);
        return false;
    }
    if (words + 1 + (uint64_t)ndim > SHMBUS_MAX_SHAPE_WORDS) {
        PyErr_Format(PyExc_ValueError,
                     "%U: expected at most %u words of shapes in a record, one a field and one a "
                     "dimension, got %zd with this field of %zd dimensions; give fewer fields, or "
                     "flatten some",
                     name, SHMBUS_MAX_SHAPE_WORDS, (Py_ssize_t)words + 1 + ndim, ndim);
        return false;
    }
    return true;
}

/* What the hook gave, whose items another thread may not change: a list of its own. */
static bool take_joined(struct put_arguments *self, PyObject *joined) {
    bool taken = PyList_Check(joined);
    for (Py_ssize_t i = 0; taken && i < PyList_GET_SIZE(joined); i++) {
        PyObject *name, *value;
        taken = PyArg_ParseTuple(PyList_GET_ITEM(joined, i), "UO", &name, &value) &&
                py_arguments_take_field(self, name, value);
    }
    return taken;
}

/* Makes fields of the rows, behind all others. */
static bool join_rows(struct put_arguments *self) {
    PyObject *others = PyTuple_New(self->array_count);
    for (uint32_t i = 0; others != NULL && i < self->array_count; i++) {
        PyTuple_SET_ITEM(others, i, Py_NewRef(self->names[i]));
    }
    PyObject *joined =
        others == NULL
            ? NULL
            : PyObject_CallFunctionObjArgs(hooks.join_rows, self->rows_object, others, NULL);
    Py_XDECREF(others);
    bool taken = joined != NULL && take_joined(self, joined);
    Py_XDECREF(joined);
    Py_CLEAR(self->rows_object);
    return taken;
}

bool py_arguments_finish(struct put_arguments *self, struct schema_cache *cache,
                         DeclaredSchemaObject *declared) {
    uint32_t words;
    /* A report of a failure has no fields. */
    bool checked = declared != NULL && (self->spec.flags & SHMBUS_FLAG_FAILED) == 0;
    if (!py_arguments_finish_head(self) ||
        (self->rows_object != NULL && !join_rows(self)) ||
        !(checked ? plan_declared_fields(self, declared, &words) : plan_fields(self, &words))) {
        return false;
    }
    struct record_spec *spec = &self->spec;
    spec->field_count = self->array_count;
    spec->shape = self->shape;
    spec->shape_words = words;
    spec->field_bytes = self->field_bytes;
    spec->field_ndim = self->field_ndim;
    self->schema = py_schema_cache_find(cache, spec, self->names, self->dtypes, self->field_ndim);
    if (self->schema == NULL) {
        return false;
    }
    if (!record_plan(spec)) {
        PyErr_SetString(hooks.too_large_error,
                        "the record's parts add up to more than a record can hold (2^48 bytes a "
                        "field, 4 GiB of meta); split it");
        return false;
    }
    return true;
}

bool py_arguments_fill_lists(const struct put_arguments *self, uint8_t *record) {
    const uint64_t *shape = self->shape;
    for (uint32_t i = 0; i < self->array_count; i++) {
        if (self->arrays[i] == NULL &&
            !py_fill_list(record + shape[0], self->kinds[i], self->values[i], self->field_ndim[i],
                          shape + 1)) {
            return false;
        }
        shape += 1 + self->field_ndim[i];
    }
    return true;
}

bool py_arguments_convert_lists(struct put_arguments *self) {
    const uint64_t *shape = self->shape;
    for (uint32_t i = 0; i < self->array_count; i++) {
        if (self->arrays[i] == NULL) {
            self->arrays[i] = py_convert_list(self->names[i], self->values[i], self->dtypes[i],
                                              self->kinds[i], self->field_ndim[i], shape + 1);
            if (self->arrays[i] == NULL) {
                return false;
            }
        }
        shape += 1 + self->field_ndim[i];
    }
    self->list_count = 0;
    return true;
}
