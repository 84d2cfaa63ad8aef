/* ChannelForm: see channel_form.h.
 *
 * Tensors are known by their attributes, as torch names them, so nothing of torch is linked. What is
 * not exactly of the form is left to the caller, who has words for it.
 *
 * Invariant: a tensor that was made over a payload counts as an export of its memory until its
 * library lets go of it, in whichever thread. */
#include "python/channel/channel_form.h"

#include <stdlib.h>

#include "python/channel/dlpack.h"

static PyObject *s_dtype, *s_shape, *s_is_cpu, *s_is_contiguous, *s_is_neg, *s_data_ptr;
static PyObject *s_untyped_storage, *s_nbytes, *s_storage_offset;

static bool intern_names(void) {
    struct {
        PyObject **at;
        const char *text;
    } names[] = {
        {&s_dtype, "dtype"},   {&s_shape, "shape"},
        {&s_is_cpu, "is_cpu"}, {&s_is_contiguous, "is_contiguous"},
        {&s_is_neg, "is_neg"}, {&s_data_ptr, "data_ptr"},
        {&s_nbytes, "nbytes"}, {&s_untyped_storage, "untyped_storage"},
        {&s_storage_offset, "storage_offset"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (*names[i].at == NULL) {
            *names[i].at = PyUnicode_InternFromString(names[i].text);
        }
        if (*names[i].at == NULL) {
            return false;
        }
    }
    return true;
}

/* An interrupt is not for us to swallow. */
static void forget_error(void) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
}

static bool is_attribute(PyObject *tensor, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(tensor, name);
    Py_XDECREF(found); /* dtypes and booleans live for ever */
    return found == wanted;
}

static bool says(PyObject *tensor, PyObject *method, PyObject *wanted) {
    PyObject *found = PyObject_CallMethodNoArgs(tensor, method);
    Py_XDECREF(found);
    return found == wanted;
}

static const uint8_t *data_of(PyObject *tensor) {
    PyObject *number = PyObject_CallMethodNoArgs(tensor, s_data_ptr);
    void *at = number == NULL ? NULL : PyLong_AsVoidPtr(number);
    Py_XDECREF(number);
    return at;
}

/* False also with an exception. */
static bool count_of(PyObject *object, PyObject *method, uint64_t *count) {
    PyObject *number = object == NULL ? NULL : PyObject_CallMethodNoArgs(object, method);
    *count = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(number);
    return number != NULL && !PyErr_Occurred();
}

/* Whether its storage has all of its bytes: one that was freed, or cut, leaves a tensor's address
 * and shape as they were. */
static bool is_there(PyObject *tensor, const struct form_tensor *form) {
    uint64_t bytes, first;
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, s_untyped_storage);
    bool known = count_of(storage, s_nbytes, &bytes) && count_of(tensor, s_storage_offset, &first);
    Py_XDECREF(storage);
    return known && form->bytes <= bytes &&
           !__builtin_mul_overflow(first, (uint64_t)(form->dl_bits / 8), &first) &&
           first <= bytes - form->bytes;
}

static bool has_shape(PyObject *tensor, PyObject *wanted) {
    PyObject *shape = PyObject_GetAttr(tensor, s_shape);
    bool same = shape != NULL && PyObject_RichCompareBool(shape, wanted, Py_EQ) == 1;
    Py_XDECREF(shape);
    return same;
}

static bool find_one(ChannelFormObject *self, const struct form_tensor *form, PyObject *tensor,
                     const uint8_t **at) {
    /* A subclass may mean something else by any of these. */
    return (PyObject *)Py_TYPE(tensor) == self->tensor_type &&
           is_attribute(tensor, s_dtype, form->dtype) &&
           is_attribute(tensor, s_is_cpu, Py_True) && has_shape(tensor, form->shape) &&
           says(tensor, s_is_contiguous, Py_True) && says(tensor, s_is_neg, Py_False) &&
           is_there(tensor, form) && (*at = data_of(tensor)) != NULL;
}

void py_channel_form_let_go(struct form_found *found) {
    while (found->count > 0) {
        Py_DECREF(found->kept[--found->count]);
    }
}

bool py_channel_form_find(ChannelFormObject *self, PyObject *tensors, struct form_found *found) {
    found->count = 0;
    if (!PyDict_CheckExact(tensors) || PyDict_GET_SIZE(tensors) != self->count) {
        return false;
    }
    Py_ssize_t place = 0;
    PyObject *name, *tensor;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (!PyDict_Next(tensors, &place, &name, &tensor)) {
            break;
        }
        const struct form_tensor *form = &self->tensors[i];
        bool named = name == form->name ||
                     (PyUnicode_CheckExact(name) && PyUnicode_Compare(name, form->name) == 0);
        if (!named) {
            break;
        }
        found->kept[found->count++] = Py_NewRef(tensor);
        if (!find_one(self, form, tensor, &found->at[i])) {
            break;
        }
        if (i + 1 == self->count) {
            return true;
        }
    }
    forget_error();
    py_channel_form_let_go(found);
    return false;
}

/* ---- tensors over a payload ---- */

static void let_go(struct dlpack_managed *managed) {
    if (!Py_IsInitialized()) {
        return; /* the process ends */
    }
    PyGILState_STATE state = PyGILState_Ensure();
    ChannelMemoryObject *memory = managed->context;
    memory->exports--;
    Py_DECREF(memory);
    PyGILState_Release(state);
    free(managed);
}

static void capsule_destroy(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, DLPACK_CAPSULE)) {
        struct dlpack_managed *managed = PyCapsule_GetPointer(capsule, DLPACK_CAPSULE);
        managed->deleter(managed);
    }
}

static PyObject *capsule_of(const struct form_tensor *form, ChannelMemoryObject *memory) {
    Py_ssize_t ndim = PyTuple_GET_SIZE(form->shape);
    struct dlpack_managed *managed =
        malloc(sizeof *managed + 2 * (size_t)ndim * sizeof(int64_t));
    if (managed == NULL) {
        return PyErr_NoMemory();
    }
    int64_t *shape = (int64_t *)(managed + 1);
    int64_t *strides = shape + ndim;
    int64_t stride = 1;
    for (Py_ssize_t i = ndim - 1; i >= 0; i--) {
        shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(form->shape, i));
        strides[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
    *managed = (struct dlpack_managed){
        .tensor = {.data = memory->at + form->offset,
                   .device_type = DLPACK_CPU,
                   .ndim = (int32_t)ndim,
                   .code = form->dl_code,
                   .bits = form->dl_bits,
                   .lanes = 1,
                   .shape = shape,
                   .strides = strides},
        .context = memory,
        .deleter = let_go,
    };
    PyObject *capsule = PyCapsule_New(managed, DLPACK_CAPSULE, capsule_destroy);
    if (capsule == NULL) {
        free(managed);
        return NULL;
    }
    Py_INCREF(memory);
    memory->exports++;
    return capsule;
}

PyObject *py_channel_form_view(ChannelFormObject *self, ChannelMemoryObject *memory) {
    PyObject *tensors = self->refused || memory->at == NULL ? NULL : PyDict_New();
    for (Py_ssize_t i = 0; tensors != NULL && i < self->count; i++) {
        PyObject *capsule = capsule_of(&self->tensors[i], memory);
        PyObject *tensor =
            capsule == NULL ? NULL : PyObject_CallOneArg(self->from_dlpack, capsule);
        if (tensor == NULL || PyDict_SetItem(tensors, self->tensors[i].name, tensor) < 0) {
            Py_CLEAR(tensors);
            forget_error();
            self->refused = !PyErr_Occurred();
        }
        Py_XDECREF(capsule);
        Py_XDECREF(tensor);
    }
    return tensors;
}

/* ---- the type ---- */

static bool set_tensor(ChannelFormObject *self, struct form_tensor *form, PyObject *tuple) {
    PyObject *name, *dtype, *shape;
    unsigned long long offset, bytes;
    if (!PyArg_ParseTuple(tuple, "UOO!KKbb", &name, &dtype, &PyTuple_Type, &shape, &offset,
                          &bytes, &form->dl_code, &form->dl_bits)) {
        return false;
    }
    uint64_t found = form->dl_bits / 8;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) {
        long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (size < 0 || __builtin_mul_overflow(found, (uint64_t)size, &found)) {
            found = UINT64_MAX;
            break;
        }
    }
    if (!PyErr_Occurred() &&
        (found != bytes || bytes > self->bytes || offset > self->bytes - bytes)) {
        PyErr_Format(PyExc_ValueError,
                     "ChannelForm: tensor '%U' of %llu bytes at %llu has not its shape's bytes, or "
                     "lies outside of %llu bytes",
                     name, bytes, offset, (unsigned long long)self->bytes);
    }
    if (PyErr_Occurred()) {
        return false;
    }
    form->name = Py_NewRef(name);
    form->dtype = Py_NewRef(dtype);
    form->shape = Py_NewRef(shape);
    form->offset = offset;
    form->bytes = bytes;
    return true;
}

/* ChannelForm(head, bytes, tensors, tensor_type, from_dlpack); tensors: a tuple of (name, dtype,
 * shape, offset, bytes, dl_code, dl_bits). */
static PyObject *form_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *head, *tensors, *tensor_type, *from_dlpack;
    unsigned long long bytes;
    (void)named;
    if (!intern_names() ||
        !PyArg_ParseTuple(args, "SKO!OO", &head, &bytes, &PyTuple_Type, &tensors, &tensor_type,
                          &from_dlpack)) {
        return NULL;
    }
    if (PyTuple_GET_SIZE(tensors) > CHANNEL_FORM_MAX_TENSORS) {
        return PyErr_Format(PyExc_ValueError, "ChannelForm: expected at most %d tensors, got %zd",
                            CHANNEL_FORM_MAX_TENSORS, PyTuple_GET_SIZE(tensors));
    }
    ChannelFormObject *self = (ChannelFormObject *)type->tp_alloc(type, PyTuple_GET_SIZE(tensors));
    if (self == NULL) {
        return NULL;
    }
    self->head = Py_NewRef(head);
    self->tensor_type = Py_NewRef(tensor_type);
    self->from_dlpack = Py_NewRef(from_dlpack);
    self->bytes = bytes;
    for (; self->count < PyTuple_GET_SIZE(tensors); self->count++) {
        PyObject *each = PyTuple_GET_ITEM(tensors, self->count);
        if (!set_tensor(self, &self->tensors[self->count], each)) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static void form_dealloc(ChannelFormObject *self) {
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_DECREF(self->tensors[i].name);
        Py_DECREF(self->tensors[i].dtype);
        Py_DECREF(self->tensors[i].shape);
    }
    Py_XDECREF(self->head);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->from_dlpack);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject ChannelFormType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.ChannelForm",
    .tp_basicsize = sizeof(ChannelFormObject),
    .tp_itemsize = sizeof(struct form_tensor),
    .tp_new = form_new,
    .tp_dealloc = (destructor)form_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = PyDoc_STR(
        "How steps that are alike lie in a slot: ``ChannelForm(head, size, tensors, tensor_type, "
        "from_dlpack)``.\n\n"
        "Parameters\n----------\n"
        "head : bytes\n    With which the meta of such a step begins.\n"
        "size : int\n    Bytes of its payload.\n"
        "tensors : tuple\n    For each: name, dtype, shape, offset and bytes in the payload, and "
        "DLPack's code and\n    bits of the dtype.\n"
        "tensor_type : type\n    What a tensor is, with the attributes of torch's.\n"
        "from_dlpack : callable\n    From a capsule to a tensor.\n\n"
        "Raises\n------\n"
        "TypeError, ValueError\n    An argument is none, or a tensor lies outside of the payload."),
};
