/* A producer's keywords and arrays, checked and planned as a record.
 *
 * Invariant: every argument passes its checks before the first write to the segment. */
#include "python/put/put.h"

void py_arguments_begin(struct put_arguments *self, struct put_fields *fields) {
    *self = (struct put_arguments){
        .values = fields->values,
        .names = fields->names,
        .arrays = fields->arrays,
        .dtypes = fields->dtypes,
        .kinds = fields->kinds,
        .shape = fields->shape,
        .field_bytes = fields->field_bytes,
        .field_ndim = fields->field_ndim,
        .timeout_s = -1.0,
        .spec = {.round = SHMBUS_NO_ROUND},
    };
}

bool py_arguments_keep(struct put_arguments *self) {
    const size_t count = self->array_count;
    const size_t words = self->spec.shape_words;
    PyArrayObject **arrays =
        PyMem_Malloc(count * (sizeof *arrays + sizeof *self->field_bytes + 1) + words * 8);
    if (arrays == NULL) {
        PyErr_NoMemory();
        return false;
    }
    uint64_t *field_bytes = (uint64_t *)(void *)(arrays + count);
    uint64_t *shape = field_bytes + count;
    uint8_t *field_ndim = (uint8_t *)(shape + words);
    memcpy(arrays, self->arrays, count * sizeof *arrays);
    memcpy(field_bytes, self->field_bytes, count * sizeof *field_bytes);
    memcpy(shape, self->shape, words * sizeof *shape);
    memcpy(field_ndim, self->field_ndim, count);
    PyObject **names = self->names, **values = self->values;
    self->kept = self->arrays = arrays;
    self->spec.field_bytes = self->field_bytes = field_bytes;
    self->spec.shape = self->shape = shape;
    self->spec.field_ndim = self->field_ndim = field_ndim;
    self->names = self->values = NULL;
    for (size_t i = 0; i < count; i++) {
        Py_DECREF(names[i]);
        Py_DECREF(values[i]);
    }
    return true;
}

void py_arguments_end(struct put_arguments *self) {
    for (uint32_t i = 0; i < self->array_count; i++) {
        Py_XDECREF(self->arrays[i]);
        if (self->kept == NULL) {
            Py_DECREF(self->names[i]);
            Py_DECREF(self->values[i]);
        }
    }
    self->array_count = 0;
    PyMem_Free(self->kept);
    Py_CLEAR(self->id_object);
    Py_CLEAR(self->meta_object);
    Py_CLEAR(self->meta_encoded);
    Py_CLEAR(self->split_object);
    Py_CLEAR(self->rows_object);
    Py_CLEAR(self->schema);
    Py_CLEAR(self->declared);
}

bool py_take_integer(PyObject *value, const char *name, int64_t low, int64_t high,
                     int64_t *out) {
    bool is_int = PyIndex_Check(value) && !PyBool_Check(value);
    PyObject *integer = is_int ? PyNumber_Index(value) : NULL;
    if (integer == NULL) {
        /* Raised for an array of several numbers; other exceptions of __index__ pass through. */
        if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s: expected an int, got %.100s", name,
                         Py_TYPE(value)->tp_name);
        }
        return false;
    }
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(integer, &overflow);
    if (overflow != 0 || number < low || number > high) {
        PyErr_Format(PyExc_ValueError, "%s: expected %lld to %lld, got %R", name, (long long)low,
                     (long long)high, integer);
        Py_DECREF(integer);
        return false;
    }
    Py_DECREF(integer);
    *out = number;
    return true;
}

/* Replace the error of float(), whose text lacks the argument's name. */
static void number_error(const char *name, const char *expected, PyObject *value) {
    bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
    if (!too_large && !PyErr_ExceptionMatches(PyExc_TypeError) &&
        !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return; /* of the value's own code, or of a signal handler */
    }
    PyErr_Clear();
    if (too_large) {
        PyErr_Format(PyExc_ValueError, "%s: expected %s, got %R, which no float can hold", name,
                     expected, value);
    } else {
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got %.100s", name, expected,
                     Py_TYPE(value)->tp_name);
    }
}

bool py_parse_policy_versions(PyObject *value, int64_t *oldest, uint32_t *span) {
    *span = 0;
    if (!PyTuple_Check(value) && !PyList_Check(value)) {
        return py_take_integer(value, "policy_version", 0, INT64_MAX, oldest);
    }
    int64_t newest;
    if (PySequence_Fast_GET_SIZE(value) != 2) {
        return py_refuse(
            PyExc_ValueError,
            "policy_version: expected an int, or two: the oldest and the newest, got %R", value);
    }
    /* Conversion runs the caller's code, which may empty the list. */
    PyObject *pair = PySequence_Tuple(value);
    bool taken =
        pair != NULL &&
        py_take_integer(PyTuple_GET_ITEM(pair, 0), "policy_version", 0, INT64_MAX, oldest) &&
        py_take_integer(PyTuple_GET_ITEM(pair, 1), "policy_version", 0, INT64_MAX, &newest);
    if (taken && (newest < *oldest || newest - *oldest > (int64_t)UINT32_MAX)) {
        PyErr_Format(PyExc_ValueError,
                     "policy_version: expected the oldest and then the newest, at most %u later, "
                     "got %R",
                     UINT32_MAX, value);
        taken = false;
    }
    Py_XDECREF(pair);
    *span = taken ? (uint32_t)(newest - *oldest) : 0;
    return taken;
}

/* The item() of a tensor or array; NULL with an exception. */
static PyObject *score_item(PyObject *value) {
    PyObject *item = PyObject_CallMethod(value, "item", NULL);
    if (item != NULL && !PyFloat_Check(item) && !PyLong_Check(item)) {
        PyErr_Format(PyExc_TypeError, "score: expected a float, got %.100s, whose item() is %.100s",
                     Py_TYPE(value)->tp_name, Py_TYPE(item)->tp_name);
        Py_CLEAR(item);
    } else if (item == NULL && (PyErr_ExceptionMatches(PyExc_ValueError) ||
                                PyErr_ExceptionMatches(PyExc_RuntimeError) ||
                                PyErr_ExceptionMatches(PyExc_TypeError))) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "score: expected a float, got %.100s with more or less than one element; "
                     "a number for each token is a field of its own",
                     Py_TYPE(value)->tp_name);
    }
    return item;
}

static bool score_of_number(PyObject *value, double *number) {
    if (!PyNumber_Check(value) || PyComplex_Check(value)) {
        return py_refuse(PyExc_TypeError, "score: expected a float, got %.100s",
                         Py_TYPE(value)->tp_name);
    }
    *number = PyFloat_AsDouble(value);
    if (*number == -1.0 && PyErr_Occurred()) {
        number_error("score", "a finite float", value);
        return false;
    }
    return true;
}

/* True for a tensor or the like: an item() method, but no number of Python or NumPy. */
static bool has_item(PyObject *value) {
    return !PyLong_Check(value) && !PyFloat_Check(value) && !PyArray_IsScalar(value, Generic) &&
           PyObject_HasAttrString(value, "item");
}

bool py_parse_score(PyObject *value, double *score) {
    double number;
    if (PyFloat_CheckExact(value)) {
        number = PyFloat_AS_DOUBLE(value);
    } else if (value == Py_None) {
        *score = SHMBUS_UNSCORED;
        return true;
    } else if (has_item(value)) {
        PyObject *item = score_item(value);
        bool found = item != NULL && score_of_number(item, &number);
        Py_XDECREF(item);
        if (!found) {
            return false;
        }
    } else if (!score_of_number(value, &number)) {
        return false;
    }
    if (!isfinite(number)) {
        return py_refuse(
            PyExc_ValueError,
            "score: expected a finite number, got %S; a sample without a reward should "
            "not be put, and one that is scored later is put with score=None",
            value);
    }
    if (fabs(number) > MAX_SCORE) {
        return py_refuse(PyExc_ValueError,
                         "score: expected a number within 1e+38, got %S; differences of larger "
                         "scores overflow the float32 of a batch: scale the reward",
                         value);
    }
    *score = number;
    return true;
}

bool py_parse_timeout(PyObject *value, double *timeout_s) {
    if (value == Py_None) {
        *timeout_s = -1.0;
        return true;
    }
    if (!PyNumber_Check(value) || PyComplex_Check(value) || PyBool_Check(value) ||
        PyArray_IsScalar(value, Bool)) {
        return py_refuse(PyExc_TypeError, "timeout: expected seconds or None, got %.100s",
                         Py_TYPE(value)->tp_name);
    }
    *timeout_s = PyFloat_AsDouble(value);
    if (*timeout_s == -1.0 && PyErr_Occurred()) {
        number_error("timeout", "seconds or None", value);
        return false;
    }
    if (!(*timeout_s >= 0.0)) {
        return py_refuse(PyExc_ValueError,
                         "timeout: expected 0 or more seconds, or None to wait for ever, got %R",
                         value);
    }
    if (isinf(*timeout_s)) {
        *timeout_s = -1.0;
    }
    return true;
}

/* A new reference to the decimal text of an int id; NULL with an exception. */
static PyObject *id_text(PyObject *value) {
    if (!PyBool_Check(value) && !PyArray_IsScalar(value, Bool) && !PyArray_Check(value) &&
        PyIndex_Check(value)) {
        return PyNumber_ToBase(value, 10);
    }
    return PyErr_Format(PyExc_TypeError, "instance_id: expected a str or an int, got %.100s",
                        Py_TYPE(value)->tp_name);
}

bool py_parse_round(PyObject *value, int64_t *round) {
    *round = SHMBUS_NO_ROUND;
    return value == Py_None || py_take_integer(value, "round", 0, INT64_MAX, round);
}

PyObject *py_take_id(PyObject *value, const char **text, uint32_t *size) {
    PyObject *id = PyUnicode_Check(value) ? Py_NewRef(value) : id_text(value);
    if (id == NULL) {
        return NULL;
    }
    Py_ssize_t bytes;
    *text = PyUnicode_AsUTF8AndSize(id, &bytes);
    if (*text == NULL) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError,
                     "instance_id: expected text that UTF-8 can encode, got %A; drop its "
                     "surrogates",
                     value);
    } else if (bytes < 1 || bytes > (Py_ssize_t)SHMBUS_MAX_ID_BYTES) {
        PyErr_Format(PyExc_ValueError,
                     "instance_id: expected 1 to %u bytes of UTF-8, got %zd; name the prompt by a "
                     "short key and put the rest into meta",
                     SHMBUS_MAX_ID_BYTES, bytes);
    } else {
        *size = (uint32_t)bytes;
        return id;
    }
    Py_DECREF(id);
    return NULL;
}

bool py_arguments_take_id(struct put_arguments *self, PyObject *value) {
    PyObject *id = py_take_id(value, &self->spec.id, &self->spec.id_bytes);
    if (id == NULL) {
        return false;
    }
    /* Owned, like every argument: conversion runs the caller's code, which may change the
     * mapping. */
    Py_XSETREF(self->id_object, id);
    return true;
}

/* Take a field under an arbitrary name; false with an exception. */
static bool py_arguments_take_field(struct put_arguments *self, PyObject *name, PyObject *value) {
    if (self->array_count == SHMBUS_MAX_FIELDS) {
        return py_refuse(PyExc_ValueError,
                         "expected at most %u array fields; put the rest into meta",
                         SHMBUS_MAX_FIELDS);
    }
    uint32_t i = self->array_count;
    self->names[i] = Py_NewRef(name);
    self->values[i] = Py_NewRef(value);
    self->arrays[i] = NULL;
    self->array_count++;
    return true;
}

static bool refuse_row_lengths(void) {
    return py_refuse(PyExc_ValueError,
                     "%U: this field is made of rows=, and cannot be given; pass "
                     "rows=[{...}, {...}], or call the array something else",
                     py_word.row_lengths);
}

static bool take_split(struct put_arguments *self, PyObject *value) {
    if (value != Py_None && !py_split_check(value)) {
        return false;
    }
    Py_XSETREF(self->split_object, value == Py_None ? NULL : Py_NewRef(value));
    return true;
}

static bool take_need(struct put_arguments *self, PyObject *value) {
    int64_t number = 0;
    bool taken =
        value == Py_None || py_take_integer(value, "need", 1, SHMBUS_MAX_GROUP_SIZE, &number);
    self->spec.need = (uint32_t)number;
    return taken;
}

/* Compare reserved words by identity: call keywords come interned. */
bool py_arguments_take(struct put_arguments *self, PyObject *name, PyObject *value) {
    int64_t number = 0;
    if (name == py_word.group_size) {
        self->has_group_size =
            py_take_integer(value, "group_size", 1, SHMBUS_MAX_GROUP_SIZE, &number);
        self->spec.group_size = (uint32_t)number;
        return self->has_group_size;
    }
    if (name == py_word.index) {
        self->has_index = py_take_integer(value, "index", 0, SHMBUS_MAX_GROUP_SIZE - 1, &number);
        self->spec.index = (uint32_t)number;
        return self->has_index;
    }
    if (name == py_word.score) {
        return py_parse_score(value, &self->spec.score);
    }
    if (name == py_word.policy_version) {
        return py_parse_policy_versions(value, &self->spec.policy_version,
                                        &self->spec.version_span);
    }
    if (name == py_word.round) {
        return py_parse_round(value, &self->spec.round);
    }
    if (name == py_word.meta) {
        Py_XSETREF(self->meta_object, value == Py_None ? NULL : Py_NewRef(value));
        return true;
    }
    if (name == py_word.split) {
        return take_split(self, value);
    }
    if (name == py_word.need) {
        return take_need(self, value);
    }
    if (name == py_word.rows) {
        Py_XSETREF(self->rows_object, value == Py_None ? NULL : Py_NewRef(value));
        return true;
    }
    if (name == py_word.row_lengths) {
        return refuse_row_lengths();
    }
    if (name == py_word.timeout) {
        return py_parse_timeout(value, &self->timeout_s);
    }
    if (name == py_word.instance_id) {
        if (self->id_object != NULL) {
            return py_refuse(PyExc_TypeError, "got two values for the argument 'instance_id'");
        }
        return py_arguments_take_id(self, value);
    }
    if (PyUnicode_CheckExact(name) && !PyUnicode_CHECK_INTERNED(name)) {
        /* Intern a computed key and compare again by identity. */
        PyObject *interned = Py_NewRef(name);
        PyUnicode_InternInPlace(&interned);
        bool taken = py_arguments_take(self, interned, value);
        Py_DECREF(interned);
        return taken;
    }
    return py_arguments_take_field(self, name, value);
}

bool py_arguments_take_mapping(struct put_arguments *arguments, PyObject *item) {
    if (!PyDict_Check(item)) {
        return py_refuse(PyExc_TypeError, "expected a dict of put's arguments, got %.100s",
                         Py_TYPE(item)->tp_name);
    }
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(item, &position, &key, &value)) {
        if (!PyUnicode_Check(key)) {
            return py_refuse(PyExc_TypeError, "expected str keys, got %.100s",
                             Py_TYPE(key)->tp_name);
        }
        Py_INCREF(key);
        Py_INCREF(value);
        bool taken = py_arguments_take(arguments, key, value);
        Py_DECREF(key);
        Py_DECREF(value);
        if (!taken) {
            return false;
        }
    }
    return true;
}

/* Check the number of samples to complete the group. Below group_size a round must tell a late
 * sample from the next group's. */
static bool check_need(const struct record_spec *spec) {
    if (spec->need > spec->group_size) {
        return py_refuse(PyExc_ValueError, "need: expected 1 to %u for group_size=%u, got %u",
                         spec->group_size, spec->group_size, spec->need);
    }
    if (spec->need != 0 && spec->need < spec->group_size && spec->round == SHMBUS_NO_ROUND) {
        return py_refuse(PyExc_ValueError,
                         "need: %u of group_size=%u needs a round, by which a late sample is told "
                         "from the prompt's next group; pass round=, such as producer.next_round() "
                         "once for the group, or use put_group",
                         spec->need, spec->group_size);
    }
    return true;
}

bool py_arguments_finish_head(struct put_arguments *self) {
    if (self->id_object == NULL || !self->has_group_size || !self->has_index) {
        return py_refuse(PyExc_TypeError, "missing the argument '%s'",
                         self->id_object == NULL ? "instance_id"
                         : !self->has_group_size ? "group_size"
                                                 : "index");
    }
    if (self->spec.index >= self->spec.group_size) {
        return py_refuse(PyExc_ValueError, "index: expected 0 to %u for group_size=%u, got %u",
                         self->spec.group_size - 1, self->spec.group_size, self->spec.index);
    }
    if (!check_need(&self->spec)) {
        return false;
    }
    if (self->meta_object != NULL) {
        self->meta_encoded = PyObject_CallOneArg(hooks.encode_meta, self->meta_object);
        if (self->meta_encoded == NULL) {
            return false;
        }
        NEVER(!PyBytes_Check(self->meta_encoded), false);
        self->spec.meta_bytes = (uint64_t)PyBytes_GET_SIZE(self->meta_encoded);
    }
    return true;
}

/* ---- The fields of a put: matched with the declared schema, taken as arrays or lists, and
 * planned.
 *
 * Invariants: a list keeps its place in `values` until conversion. Its sizes were read once; the
 * conversion checks them again while reading the elements. */
/* Above a record's capacity: record_plan refuses it. */
#define BEYOND_A_RECORD ((UINT64_C(1) << 48) + 1)

/* Fields read by every trainer have a dtype without a declaration. */
static struct {
    PyObject *const *name;
    int type;
    enum stored_kind kind;
    PyArray_Descr *dtype; /* known once py_standard_dtypes was called */
} standard[] = {
    {&py_word.tokens, NPY_INT32, STORED_I32, NULL},
    {&py_word.loss_mask, NPY_UINT8, STORED_U8, NULL},
    {&py_word.logprobs, NPY_FLOAT32, STORED_F32, NULL},
    {&py_word.advantages, NPY_FLOAT32, STORED_F32, NULL},
};

PyObject *py_standard_dtypes(void) {
    PyObject *dtypes = PyDict_New();
    for (size_t s = 0; dtypes != NULL && s < sizeof standard / sizeof *standard; s++) {
        standard[s].dtype = PyArray_DescrFromType(standard[s].type);
        if (PyDict_SetItem(dtypes, *standard[s].name, (PyObject *)standard[s].dtype) < 0) {
            Py_CLEAR(dtypes);
        }
    }
    return dtypes;
}

/* Choose the dtype for a list's elements; false with an exception if undefined. */
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
        if (name == *standard[s].name || PyUnicode_Compare(name, *standard[s].name) == 0) {
            self->dtypes[i] = standard[s].dtype;
            self->kinds[i] = (uint8_t)standard[s].kind;
            return true;
        }
    }
    Py_XDECREF(py_as_array(name, self->values[i], false)); /* raises with advice on a declaration */
    return false;
}

uint64_t py_field_bytes(PyArray_Descr *dtype, int ndim, const uint64_t *sizes) {
    uint64_t bytes = (uint64_t)PyDataType_ELSIZE(dtype);
    double estimate = (double)bytes;
    for (int d = 0; d < ndim; d++) {
        estimate *= (double)sizes[d];
        bytes *= sizes[d];
    }
    return estimate >= (double)BEYOND_A_RECORD ? BEYOND_A_RECORD : bytes;
}

/* Plan the place of a list, or of a number for a field without dimensions, from its sizes. */
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
    self->field_bytes[i] = py_field_bytes(self->dtypes[i], ndim, sizes);
    memcpy(self->shape + words + 1, sizes, (size_t)ndim * sizeof *sizes);
    return true;
}

/* Convert an array to the declared dtype if different; false with an exception. */
static bool convert_dtype(struct put_arguments *self, uint32_t i,
                          const DeclaredSchemaObject *declared, uint8_t field) {
    PyArrayObject *array = self->arrays[i];
    PyArray_Descr *wanted = declared->dtypes[field];
    if (!py_same_dtype(PyArray_DESCR(array), wanted)) {
        PyArrayObject *converted =
            py_convert_array(self->names[i], array, wanted, declared->kinds[field]);
        if (converted == NULL) {
            return false;
        }
        Py_SETREF(self->arrays[i], converted);
    }
    return true;
}

/* Prepare an array for the copy: from the value, in the declared dtype, C-contiguous. */
static bool take_array(struct put_arguments *self, uint32_t i,
                       const DeclaredSchemaObject *declared, uint8_t field) {
    PyObject *value = self->values[i];
    PyObject *array;
    /* The hook refuses a single number under a name close to an argument's, and masked arrays. */
    if (PyArray_CheckExact(value) && PyArray_NDIM((PyArrayObject *)value) > 0) {
        array = Py_NewRef(value);
    } else {
        array = py_as_array(self->names[i], value, declared != NULL);
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

/* True if copied unchanged, like most fields. */
static inline bool is_plain(PyObject *value, const DeclaredSchemaObject *declared, uint8_t field) {
    return PyArray_CheckExact(value) && PyArray_NDIM((PyArrayObject *)value) > 0 &&
           PyArray_IS_C_CONTIGUOUS((PyArrayObject *)value) &&
           (declared == NULL ||
            PyArray_DESCR((PyArrayObject *)value) == declared->dtypes[field]);
}

/* Plan the place of a taken array. */
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

static inline bool plan_field(struct put_arguments *self, uint32_t i, uint32_t words,
                              const DeclaredSchemaObject *declared, uint8_t field) {
    PyObject *value = self->values[i];
    if (is_plain(value, declared, field)) {
        self->arrays[i] = (PyArrayObject *)Py_NewRef(value);
        self->dtypes[i] = PyArray_DESCR(self->arrays[i]);
        return plan_array(self, i, words);
    }
    const bool is_number = PyLong_Check(value) || PyFloat_Check(value);
    if (py_is_list(value) || (declared != NULL && is_number)) {
        return plan_list(self, i, words, declared, field);
    }
    return take_array(self, i, declared, field) && plan_array(self, i, words);
}

/* Plan every field, and count the shape words. */
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
    self->declared = Py_NewRef((PyObject *)declared); /* keeps its dtypes alive until the end */
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
        return py_refuse(PyExc_ValueError, "%U: expected at most %u dimensions, got %zd", name,
                         SHMBUS_MAX_NDIM, ndim);
    }
    if (words + 1 + (uint64_t)ndim > SHMBUS_MAX_SHAPE_WORDS) {
        return py_refuse(
            PyExc_ValueError,
            "%U: expected at most %u words of shapes in a record, one a field and one a "
            "dimension, got %zd with this field of %zd dimensions; give fewer fields, or "
            "flatten some",
            name, SHMBUS_MAX_SHAPE_WORDS, (Py_ssize_t)words + 1 + ndim, ndim);
    }
    return true;
}

/* Take the hook's result into a private list, safe from other threads' changes. */
static bool take_joined(struct put_arguments *self, PyObject *joined) {
    bool taken = PyList_Check(joined);
    for (Py_ssize_t i = 0; taken && i < PyList_GET_SIZE(joined); i++) {
        PyObject *name, *value;
        taken = PyArg_ParseTuple(PyList_GET_ITEM(joined, i), "UO", &name, &value) &&
                py_arguments_take_field(self, name, value);
    }
    return taken;
}

/* Turn the rows into fields, after the other fields. */
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
    /* A failure report has no fields. */
    bool checked = declared != NULL && (self->spec.flags & SHMBUS_FLAG_FAILED) == 0;
    if (!py_arguments_finish_head(self) ||
        (self->rows_object != NULL && !join_rows(self)) ||
        !(checked ? plan_declared_fields(self, declared, &words) : plan_fields(self, &words))) {
        return false;
    }
    self->spec.shape_words = words;
    return py_arguments_plan(self, cache, self->array_count, self->spec.meta_bytes,
                             "the record's parts add up to more than a record can hold (2^48 bytes "
                             "a field, 4 GiB of meta); split it");
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
    return true;
}
