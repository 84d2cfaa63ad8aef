/* Conversion of lists, numbers and arrays of a different dtype into an array of the field's dtype.
 *
 * Invariant: the elements' own code runs and may change a list under way. The list's size is
 * checked again after every element, and writes go only to an array owned here. */
#include "python/put/put.h"

/* State of a conversion: position and destination. */
struct conversion {
    PyObject *name;
    PyArray_Descr *dtype;
    enum stored_kind kind;
    int ndim;
    const uint64_t *sizes;
    Py_ssize_t path[SHMBUS_MAX_NDIM];
    uint8_t *to;
    size_t itemsize;
};

/* "name[3][1]", of the first `depth` indices; NULL with an exception. */
static PyObject *place_text(const struct conversion *self, int depth) {
    PyObject *text = Py_NewRef(self->name);
    for (int d = 0; text != NULL && d < depth; d++) {
        PyObject *longer = PyUnicode_FromFormat("%U[%zd]", text, self->path[d]);
        Py_SETREF(text, longer);
    }
    return text;
}

/* Raise "PLACE: expected ..., got ..."; steals `expected`, which may be NULL. */
static bool refuse(const struct conversion *self, int depth, PyObject *type, PyObject *expected) {
    PyObject *place = expected == NULL ? NULL : place_text(self, depth);
    if (place != NULL) {
        PyErr_Format(type, "%U: expected %U", place, expected);
    }
    Py_XDECREF(place);
    Py_XDECREF(expected);
    return false;
}

static bool refuse_element(const struct conversion *self, PyObject *value) {
    const char *advice = value == Py_None && stored_is_float(self->kind)
                             ? "; put nan where there is none, or leave the field out"
                         : value == Py_None ? "; put a number there, or leave the field out"
                                            : "";
    const char *wanted = stored_is_float(self->kind)       ? "a number"
                         : self->kind == STORED_BOOL       ? "a bool, 0 or 1"
                         : stored_takes_bool(self->kind) ? "an int or a bool"
                                                           : "an int";
    PyObject *dtype = py_dtype_text(self->dtype);
    PyObject *expected =
        dtype == NULL
            ? NULL
            : PyUnicode_FromFormat("%s for %U, got %.100s%s", wanted, dtype,
                                   value == Py_None ? "None" : Py_TYPE(value)->tp_name, advice);
    Py_XDECREF(dtype);
    return refuse(self, self->ndim, PyExc_TypeError, expected);
}

static bool refuse_range(const struct conversion *self, PyObject *value) {
    PyObject *dtype = py_dtype_text(self->dtype);
    PyObject *expected =
        dtype == NULL
            ? NULL
            : PyUnicode_FromFormat("a number that %U holds, got %S; declare a wider dtype", dtype,
                                   value);
    Py_XDECREF(dtype);
    return refuse(self, self->ndim, PyExc_ValueError, expected);
}

/* Replace an error of float() or int(); pass unrelated exceptions through. */
static bool refuse_failed(const struct conversion *self, PyObject *value) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError) &&
        !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return false;
    }
    bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    return too_large ? refuse_range(self, value) : refuse_element(self, value);
}

static bool convert_int(struct conversion *self, PyObject *value) {
    int overflow;
    if (PyLong_CheckExact(value)) { /* nearly every element */
        int64_t plain = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow == 0) {
            return store_int(self->to, self->kind, plain) || refuse_range(self, value);
        }
    }
    bool is_bool = PyBool_Check(value) || PyArray_IsScalar(value, Bool);
    if (is_bool) {
        int64_t truth = PyObject_IsTrue(value) == 1;
        return stored_takes_bool(self->kind) ? store_int(self->to, self->kind, truth)
                                             : refuse_element(self, value);
    }
    if (!PyIndex_Check(value)) {
        return refuse_element(self, value);
    }
    PyObject *integer = PyNumber_Index(value);
    if (integer == NULL) {
        return refuse_failed(self, value);
    }
    int64_t number = PyLong_AsLongLongAndOverflow(integer, &overflow);
    bool fits = overflow == 0 && store_int(self->to, self->kind, number);
    if (overflow > 0 && self->kind == STORED_U64) {
        uint64_t wide = PyLong_AsUnsignedLongLong(integer);
        fits = !PyErr_Occurred();
        PyErr_Clear();
        memcpy(self->to, &wide, sizeof wide);
    }
    if (!fits) {
        refuse_range(self, integer);
    }
    Py_DECREF(integer);
    return fits;
}

static bool convert_float(struct conversion *self, PyObject *value) {
    if (PyFloat_CheckExact(value)) {
        return store_double(self->to, self->kind, PyFloat_AS_DOUBLE(value)) ||
               refuse_range(self, value);
    }
    bool refused = PyBool_Check(value) || PyArray_IsScalar(value, Bool) || PyUnicode_Check(value) ||
                   PyBytes_Check(value) || PyComplex_Check(value) || !PyNumber_Check(value) ||
                   (PyArray_Check(value) && PyArray_NDIM((PyArrayObject *)value) > 0);
    if (refused) {
        return refuse_element(self, value);
    }
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
        return refuse_failed(self, value);
    }
    return store_double(self->to, self->kind, number) || refuse_range(self, value);
}

static bool convert_element(struct conversion *self, PyObject *value) {
    if (py_is_list(value)) {
        return refuse(self, self->ndim, PyExc_TypeError,
                      PyUnicode_FromFormat("a number, as first elements have %d dimensions, got "
                                           "%.100s",
                                           self->ndim, Py_TYPE(value)->tp_name));
    }
    bool done = stored_is_float(self->kind) ? convert_float(self, value) : convert_int(self, value);
    self->to += self->itemsize;
    return done;
}

/* ---- arrays ---- */

/* Write the position of a refused element into the path's last indices. */
static void locate(struct conversion *self, int depth, npy_intp at) {
    for (int d = self->ndim - 1; d >= depth; d--) {
        self->path[d] = (Py_ssize_t)((uint64_t)at % self->sizes[d]);
        at = (npy_intp)((uint64_t)at / self->sizes[d]);
    }
}

static bool refuse_array_element(struct conversion *self, int depth, PyArrayObject *array,
                                 npy_intp at) {
    locate(self, depth, at);
    PyObject *value = PyArray_GETITEM(array, PyArray_BYTES(array) + at * PyArray_ITEMSIZE(array));
    if (value != NULL) {
        refuse_range(self, value);
        Py_DECREF(value);
    }
    return false;
}

static bool refuse_array(const struct conversion *self, int depth, PyArrayObject *array) {
    PyObject *wanted = py_dtype_text(self->dtype), *got = py_dtype_text(PyArray_DESCR(array));
    PyObject *expected =
        wanted == NULL || got == NULL
            ? NULL
            : PyUnicode_FromFormat("an array of %U, got one of %U; convert it first", wanted, got);
    Py_XDECREF(wanted);
    Py_XDECREF(got);
    return refuse(self, depth, PyExc_TypeError, expected);
}

/* True if every number of kind `from` may convert to kind `to`. */
static bool kinds_fit(enum stored_kind from, enum stored_kind to) {
    return from != STORED_OTHER && to != STORED_OTHER &&
           (from == STORED_BOOL ? stored_takes_bool(to)
                                : !stored_is_float(from) || stored_is_float(to));
}

/* Convert elements of a contiguous array of native byte order into `to`, from dimension `depth`
 * on. */
static bool convert_elements(struct conversion *self, int depth, PyArrayObject *array) {
    PyArray_Descr *dtype = PyArray_DESCR(array);
    enum stored_kind from = py_stored_kind(dtype);
    if (!kinds_fit(from, self->kind)) {
        return refuse_array(self, depth, array);
    }
    const uint8_t *at = PyArray_DATA(array);
    size_t step = (size_t)PyDataType_ELSIZE(dtype);
    npy_intp count = PyArray_SIZE(array);
    for (npy_intp i = 0; i < count; i++, at += step, self->to += self->itemsize) {
        int64_t whole = 0;
        bool fits;
        if (stored_is_float(from)) {
            fits = store_double(self->to, self->kind, load_double(at, from));
        } else if (!load_int(at, from, &whole)) {
            double wide = (double)(uint64_t)whole;
            fits = stored_is_float(self->kind) ? store_double(self->to, self->kind, wide)
                                               : self->kind == STORED_U64;
            if (self->kind == STORED_U64) {
                memcpy(self->to, &whole, sizeof whole);
            }
        } else {
            fits = stored_is_float(self->kind) ? store_double(self->to, self->kind, (double)whole)
                                               : store_int(self->to, self->kind, whole);
        }
        if (!fits) {
            return refuse_array_element(self, depth, array, i);
        }
    }
    return true;
}

/* A new reference to a C-contiguous, aligned array in native byte order. */
static PyArrayObject *plain_array(PyArrayObject *array) {
    return (PyArrayObject *)PyArray_CheckFromAny((PyObject *)array, NULL, 0, 0,
                                                 NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED, NULL);
}

PyObject *py_as_array(PyObject *name, PyObject *value, bool declared) {
    PyObject *array = PyObject_CallFunctionObjArgs(hooks.as_array, name, value,
                                                   declared ? Py_True : Py_False, NULL);
    if (array != NULL && !PyArray_Check(array)) {
        Py_CLEAR(array);
        PyErr_Format(PyExc_TypeError, "%U: expected an array", name);
    }
    return array;
}

static bool is_array_like(PyObject *value) {
    return PyArray_Check(value) ||
           (!PyArray_IsScalar(value, Generic) && PyObject_HasAttrString(value, "__array__"));
}

/* Convert an array among lists: a row, or several rows, of the whole. */
static bool convert_row(struct conversion *self, PyObject *value, int depth) {
    if (!is_array_like(value)) {
        return refuse(self, depth, PyExc_TypeError,
                      PyUnicode_FromFormat("a list of %llu, got %.100s", U64(self->sizes[depth]),
                                           Py_TYPE(value)->tp_name));
    }
    PyArrayObject *given = (PyArrayObject *)py_as_array(self->name, value, true);
    PyArrayObject *array = given == NULL ? NULL : plain_array(given);
    Py_XDECREF(given);
    if (array == NULL) {
        return false;
    }
    bool fits = PyArray_NDIM(array) == self->ndim - depth;
    for (int d = depth; fits && d < self->ndim; d++) {
        fits = (uint64_t)PyArray_DIM(array, d - depth) == self->sizes[d];
    }
    bool done = fits ? convert_elements(self, depth, array)
                     : refuse(self, depth, PyExc_ValueError,
                              PyUnicode_FromFormat("an array of the shape of the one before it, "
                                                   "got one of another"));
    Py_DECREF(array);
    return done;
}

/* ---- lists ---- */

static Py_ssize_t list_size(PyObject *value) {
    return Py_SIZE(value);
}

static PyObject *list_item(PyObject *value, Py_ssize_t at) {
    return PyList_Check(value) ? PyList_GET_ITEM(value, at) : PyTuple_GET_ITEM(value, at);
}

static bool convert_level(struct conversion *self, PyObject *value, int depth) {
    if (depth == self->ndim) {
        return convert_element(self, value);
    }
    if (!py_is_list(value)) {
        return convert_row(self, value, depth);
    }
    Py_ssize_t size = list_size(value);
    if ((uint64_t)size != self->sizes[depth]) {
        return refuse(self, depth, PyExc_ValueError,
                      PyUnicode_FromFormat("%llu elements, as the first has, got %zd; give rows of "
                                           "one length, or fields of their own",
                                           U64(self->sizes[depth]), size));
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        self->path[depth] = i;
        PyObject *item = Py_NewRef(list_item(value, i));
        bool done = convert_level(self, item, depth + 1);
        Py_DECREF(item);
        if (!done) {
            return false;
        }
        if (list_size(value) != size) {
            return refuse(self, depth, PyExc_ValueError,
                          PyUnicode_FromFormat("%zd elements, got %zd: it changed while it was "
                                               "converted; nothing was put",
                                               size, list_size(value)));
        }
    }
    return true;
}

int py_list_sizes(PyObject *name, PyObject *value, uint64_t sizes[SHMBUS_MAX_NDIM]) {
    PyObject *at = Py_NewRef(value);
    int ndim = 0;
    while (py_is_list(at) && ndim < (int)SHMBUS_MAX_NDIM) {
        sizes[ndim++] = (uint64_t)list_size(at);
        if (list_size(at) == 0) {
            break;
        }
        Py_SETREF(at, Py_NewRef(list_item(at, 0)));
    }
    bool deep = py_is_list(at) && list_size(at) > 0;
    int more = 0;
    if (!py_is_list(at) && !PyLong_Check(at) && !PyFloat_Check(at) && is_array_like(at)) {
        PyArrayObject *array = (PyArrayObject *)py_as_array(name, at, true);
        if (array == NULL) {
            Py_DECREF(at);
            return -1;
        }
        more = PyArray_NDIM(array);
        deep = ndim + more > (int)SHMBUS_MAX_NDIM;
        for (int d = 0; !deep && d < more; d++) {
            sizes[ndim + d] = (uint64_t)PyArray_DIM(array, d);
        }
        Py_DECREF(array);
    }
    Py_DECREF(at);
    if (deep) {
        PyErr_Format(PyExc_ValueError, "%U: expected at most %u dimensions, got more", name,
                     SHMBUS_MAX_NDIM);
        return -1;
    }
    return ndim + more;
}

PyArrayObject *py_convert_list(PyObject *name, PyObject *value, PyArray_Descr *dtype,
                               enum stored_kind kind, int ndim, const uint64_t *sizes) {
    PyArrayObject *made = (PyArrayObject *)py_array_over(dtype, ndim, sizes, NULL, 0, NULL);
    if (made == NULL) {
        return NULL;
    }
    struct conversion conversion = {.name = name, .dtype = dtype, .kind = kind, .ndim = ndim,
                                    .sizes = sizes, .to = PyArray_DATA(made),
                                    .itemsize = (size_t)PyDataType_ELSIZE(dtype)};
    if (!convert_level(&conversion, value, 0)) {
        Py_CLEAR(made);
    }
    return made;
}

PyArrayObject *py_convert_array(PyObject *name, PyArrayObject *array, PyArray_Descr *dtype,
                                enum stored_kind kind) {
    uint64_t sizes[SHMBUS_MAX_NDIM];
    int ndim = PyArray_NDIM(array);
    for (int d = 0; d < ndim; d++) {
        sizes[d] = (uint64_t)PyArray_DIM(array, d);
    }
    PyArrayObject *plain = plain_array(array);
    PyArrayObject *made =
        plain == NULL ? NULL
                      : (PyArrayObject *)py_array_over(dtype, ndim, sizes, NULL, 0, NULL);
    if (made != NULL) {
        struct conversion conversion = {.name = name, .dtype = dtype, .kind = kind, .ndim = ndim,
                                        .sizes = sizes, .to = PyArray_DATA(made),
                                        .itemsize = (size_t)PyDataType_ELSIZE(dtype)};
        if (!convert_elements(&conversion, 0, plain)) {
            Py_CLEAR(made);
        }
    }
    Py_XDECREF(plain);
    return made;
}

/* convert_field(name, value, dtype) -> array: from a list, a tuple, a number or an array. */
PyObject *py_convert_field(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *name, *value, *given;
    uint64_t sizes[SHMBUS_MAX_NDIM];
    if (!PyArg_ParseTuple(args, "UOO!", &name, &value, &PyArrayDescr_Type, &given)) {
        return NULL;
    }
    PyArray_Descr *dtype = (PyArray_Descr *)given;
    enum stored_kind kind = py_stored_kind(dtype);
    if (PyArray_Check(value)) {
        return (PyObject *)py_convert_array(name, (PyArrayObject *)value, dtype, kind);
    }
    int ndim = py_is_list(value) ? py_list_sizes(name, value, sizes) : 0;
    return ndim < 0 ? NULL : (PyObject *)py_convert_list(name, value, dtype, kind, ndim, sizes);
}
