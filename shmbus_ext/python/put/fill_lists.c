/* The quick way from lists into a record.
 *
 * Invariant: nothing here runs code of Python, so no list changes while it is read, and the lane
 * that is written to stays this call's. Whatever would need such code is left to convert_lists. */
#include "python/put/fill_lists.h"

/* Writes so many elements; false at the first that is not plain. */
typedef bool (*row_filler)(void *to, PyObject *const *from, Py_ssize_t count);

static inline bool plain_int(PyObject *object, int64_t *value) {
    if (!PyLong_CheckExact(object)) {
        return false;
    }
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)object)) {
        *value = PyUnstable_Long_CompactValue((PyLongObject *)object);
        return true;
    }
#else
    Py_ssize_t digits = Py_SIZE(object); /* negative for a negative number */
    if (digits == 1 || digits == -1) {
        *value = (int64_t)digits * (int64_t)((PyLongObject *)object)->ob_digit[0];
        return true;
    }
#endif
    int overflow;
    *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
}

static inline bool plain_float(PyObject *object, double *value) {
    if (PyFloat_CheckExact(object)) {
        *value = PyFloat_AS_DOUBLE(object);
        return true;
    }
    int64_t whole;
    /* Above this not each int is a double; how such a one rounds is float()'s to say. */
    if (!plain_int(object, &whole) || whole > INT64_C(1) << 53 || whole < -(INT64_C(1) << 53)) {
        return false;
    }
    *value = (double)whole;
    return true;
}

#define INT_FILLER(name, type, low, high)                                                        \
    static bool name(void *to, PyObject *const *from, Py_ssize_t count) {                        \
        type *out = to;                                                                          \
        for (Py_ssize_t i = 0; i < count; i++) {                                                 \
            int64_t value;                                                                       \
            if (!plain_int(from[i], &value) || value < (low) || value > (high)) {                \
                return false;                                                                    \
            }                                                                                    \
            out[i] = (type)value;                                                                \
        }                                                                                        \
        return true;                                                                             \
    }
INT_FILLER(fill_i8, int8_t, INT8_MIN, INT8_MAX)
INT_FILLER(fill_i16, int16_t, INT16_MIN, INT16_MAX)
INT_FILLER(fill_u16, uint16_t, 0, UINT16_MAX)
INT_FILLER(fill_i32, int32_t, INT32_MIN, INT32_MAX)
INT_FILLER(fill_u32, uint32_t, 0, UINT32_MAX)
INT_FILLER(fill_i64, int64_t, INT64_MIN, INT64_MAX)
INT_FILLER(fill_u64, uint64_t, 0, INT64_MAX)

/* Of masks: bools too. */
static inline bool fill_mask(uint8_t *out, PyObject *const *from, Py_ssize_t count, int64_t high) {
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t value = from[i] == Py_True;
        if (!PyBool_Check(from[i]) &&
            (!plain_int(from[i], &value) || value < 0 || value > high)) {
            return false;
        }
        out[i] = (uint8_t)value;
    }
    return true;
}

static bool fill_bool(void *to, PyObject *const *from, Py_ssize_t count) {
    return fill_mask(to, from, count, 1);
}

static bool fill_u8(void *to, PyObject *const *from, Py_ssize_t count) {
    return fill_mask(to, from, count, UINT8_MAX);
}

static bool fill_f64(void *to, PyObject *const *from, Py_ssize_t count) {
    double *out = to;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!plain_float(from[i], &out[i])) {
            return false;
        }
    }
    return true;
}

static bool fill_f32(void *to, PyObject *const *from, Py_ssize_t count) {
    float *out = to;
    for (Py_ssize_t i = 0; i < count; i++) {
        double value;
        if (!plain_float(from[i], &value) || !store_double(&out[i], STORED_F32, value)) {
            return false;
        }
    }
    return true;
}

static inline bool fill_halves(uint16_t *out, PyObject *const *from, Py_ssize_t count,
                               enum stored_kind kind) {
    for (Py_ssize_t i = 0; i < count; i++) {
        double value;
        if (!plain_float(from[i], &value) || !store_double(&out[i], kind, value)) {
            return false;
        }
    }
    return true;
}

static bool fill_f16(void *to, PyObject *const *from, Py_ssize_t count) {
    return fill_halves(to, from, count, STORED_F16);
}

static bool fill_bf16(void *to, PyObject *const *from, Py_ssize_t count) {
    return fill_halves(to, from, count, STORED_BF16);
}

static const struct {
    row_filler fill;
    uint8_t itemsize;
} fillers[STORED_OTHER] = {
    [STORED_BOOL] = {fill_bool, 1}, [STORED_I8] = {fill_i8, 1},    [STORED_U8] = {fill_u8, 1},
    [STORED_I16] = {fill_i16, 2},   [STORED_U16] = {fill_u16, 2},  [STORED_I32] = {fill_i32, 4},
    [STORED_U32] = {fill_u32, 4},   [STORED_I64] = {fill_i64, 8},  [STORED_U64] = {fill_u64, 8},
    [STORED_F32] = {fill_f32, 4},   [STORED_F64] = {fill_f64, 8},  [STORED_F16] = {fill_f16, 2},
    [STORED_BF16] = {fill_bf16, 2},
};

/* Returns the place behind what it wrote; NULL where something is not plain. */
static uint8_t *fill_level(uint8_t *to, enum stored_kind kind, PyObject *value, int ndim,
                           const uint64_t *sizes) {
    PyObject *const *items;
    if (PyList_Check(value)) {
        items = ((PyListObject *)value)->ob_item;
    } else if (PyTuple_Check(value)) {
        items = ((PyTupleObject *)value)->ob_item;
    } else {
        return NULL;
    }
    Py_ssize_t count = Py_SIZE(value);
    if ((uint64_t)count != sizes[0]) {
        return NULL;
    }
    if (ndim == 1) {
        return fillers[kind].fill(to, items, count) ? to + (size_t)count * fillers[kind].itemsize
                                                    : NULL;
    }
    for (Py_ssize_t i = 0; to != NULL && i < count; i++) {
        to = fill_level(to, kind, items[i], ndim - 1, sizes + 1);
    }
    return to;
}

bool py_fill_list(uint8_t *to, enum stored_kind kind, PyObject *value, int ndim,
                  const uint64_t *sizes) {
    if (ndim == 0) {
        return fillers[kind].fill(to, &value, 1);
    }
    return fill_level(to, kind, value, ndim, sizes) != NULL;
}
