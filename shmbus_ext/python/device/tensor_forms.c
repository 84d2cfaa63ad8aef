/* How tensors of any library lie in their memory, many of them in one call, by the table of C
 * functions that DLPack has for it (dlpack.h, from version 1.3 on): nothing of such a library is
 * linked.
 *
 * To ask a thousand tensors one by one, from Python, takes longer than to begin to copy them. */
#include "python/device/tensor_forms.h"

#include <string.h>

#define EXCHANGE_CAPSULE "dlpack_exchange_api"
/* A later major version may have another layout. */
#define EXCHANGE_MAJOR 1

/* dlpack.h's DLTensor. */
struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits; /* of the dtype, and lanes */
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
_Static_assert(sizeof(struct dl_tensor) == 48, "as DLPack has it");

/* Its DLPackExchangeAPI, as far as it is used here. */
struct dl_exchange {
    uint32_t major, minor;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*describe)(void *object, struct dl_tensor *into);
};

/* What is said of a tensor beside its address: two words, and two more a dimension. */
#define MAX_NDIM 64
#define MAX_FORM (2 + 2 * MAX_NDIM)

struct words {
    uint64_t *at;
    size_t count, room;
};

static bool add_words(struct words *self, const uint64_t *words, size_t count) {
    if (self->room - self->count < count) {
        size_t room = self->room * 2 + count + 64;
        uint64_t *grown = PyMem_Realloc(self->at, room * sizeof *grown);
        if (grown == NULL) {
            PyErr_NoMemory();
            return false;
        }
        self->at = grown;
        self->room = room;
    }
    memcpy(self->at + self->count, words, count * sizeof *words);
    self->count += count;
    return true;
}

static size_t form_of(const struct dl_tensor *tensor, uint64_t into[MAX_FORM]) {
    into[0] = (uint64_t)(uint32_t)tensor->device_type << 32 | (uint32_t)tensor->device_id;
    into[1] = (uint64_t)(uint32_t)tensor->ndim << 32 | (uint32_t)tensor->code << 24 |
              (uint32_t)tensor->bits << 16 | tensor->lanes;
    for (int32_t dim = 0; dim < tensor->ndim; dim++) {
        into[2 + 2 * dim] = (uint64_t)tensor->shape[dim];
        into[3 + 2 * dim] = (uint64_t)(tensor->strides == NULL ? -1 : tensor->strides[dim]);
    }
    return 2 + 2 * (size_t)tensor->ndim;
}

static const struct dl_exchange *exchange_of(PyObject *capsule) {
    const struct dl_exchange *exchange = PyCapsule_GetPointer(capsule, EXCHANGE_CAPSULE);
    if (exchange != NULL && (exchange->major != EXCHANGE_MAJOR || exchange->describe == NULL)) {
        PyErr_Format(PyExc_ValueError, "exchange: expected DLPack %d's table, got one of %u.%u",
                     EXCHANGE_MAJOR, exchange->major, exchange->minor);
        return NULL;
    }
    return exchange;
}

static bool describe(const struct dl_exchange *exchange, PyObject *object,
                     struct dl_tensor *into) {
    if (exchange->describe(object, into) == 0 && into->ndim >= 0 && into->ndim <= MAX_NDIM) {
        return true;
    }
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_BufferError, "DLPack: a tensor cannot be described");
    }
    return false;
}

static bool describe_all(const struct dl_exchange *exchange, PyObject *tensors,
                         struct words *addresses, struct words *forms) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        struct dl_tensor tensor;
        uint64_t form[MAX_FORM];
        if (!describe(exchange, PyTuple_GET_ITEM(tensors, i), &tensor)) {
            return false;
        }
        uint64_t address = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
        if (!add_words(addresses, &address, 1) ||
            !add_words(forms, form, form_of(&tensor, form))) {
            return false;
        }
    }
    return true;
}

static PyObject *as_bytes(const struct words *self) {
    return PyBytes_FromStringAndSize((const char *)self->at,
                                     (Py_ssize_t)(self->count * sizeof *self->at));
}

static PyObject *py_tensor_forms(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *capsule, *tensors;
    if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyTuple_Type, &tensors)) {
        return NULL;
    }
    const struct dl_exchange *exchange = exchange_of(capsule);
    if (exchange == NULL) {
        return NULL;
    }
    struct words addresses = {NULL, 0, 0}, forms = {NULL, 0, 0};
    PyObject *found = NULL;
    if (describe_all(exchange, tensors, &addresses, &forms)) {
        found = Py_BuildValue("NN", as_bytes(&addresses), as_bytes(&forms));
    }
    PyMem_Free(addresses.at);
    PyMem_Free(forms.at);
    return found;
}

/* 1 where tensors have these types and forms, 0 where not, -1 with an exception. */
static int compare_all(const struct dl_exchange *exchange, PyObject *tensors, PyObject *types,
                       PyObject *forms) {
    if (PyTuple_GET_SIZE(tensors) != PyTuple_GET_SIZE(types)) {
        return 0;
    }
    const char *left = PyBytes_AS_STRING(forms);
    size_t bytes = (size_t)PyBytes_GET_SIZE(forms);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        PyObject *object = PyTuple_GET_ITEM(tensors, i);
        struct dl_tensor tensor;
        uint64_t form[MAX_FORM];
        if ((PyObject *)Py_TYPE(object) != PyTuple_GET_ITEM(types, i)) {
            return 0;
        }
        if (!describe(exchange, object, &tensor)) {
            return -1;
        }
        size_t wanted = form_of(&tensor, form) * sizeof *form;
        if (wanted > bytes || memcmp(left, form, wanted) != 0) {
            return 0;
        }
        left += wanted;
        bytes -= wanted;
    }
    return bytes == 0;
}

static PyObject *py_have_forms(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *capsule, *tensors, *types, *forms;
    if (!PyArg_ParseTuple(args, "OO!O!S", &capsule, &PyTuple_Type, &tensors, &PyTuple_Type, &types,
                          &forms)) {
        return NULL;
    }
    const struct dl_exchange *exchange = exchange_of(capsule);
    int same = exchange == NULL ? -1 : compare_all(exchange, tensors, types, forms);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static PyMethodDef functions[] = {
    {"tensor_forms", py_tensor_forms, METH_VARARGS,
     PyDoc_STR(
         "tensor_forms(exchange, tensors)\n--\n\n"
         "Say where tensors lie, and how.\n\n"
         "Parameters\n----------\n"
         "exchange : capsule\n    What DLPack has on the tensors' type, as "
         "``__dlpack_c_exchange_api__``.\n"
         "tensors : tuple\n    Of that type.\n\n"
         "Returns\n-------\n"
         "(bytes, bytes)\n    Their addresses; and their devices, dtypes, shapes and strides. "
         "Equal bytes mean equal\n    ones of as many tensors.\n\n"
         "Raises\n------\n"
         "TypeError, ValueError\n    An argument is none, or of another DLPack.\n"
         "BufferError, RuntimeError, ...\n    A tensor has no such memory, as its library says.")},
    {"have_forms", py_have_forms, METH_VARARGS,
     PyDoc_STR("have_forms(exchange, tensors, types, forms)\n--\n\n"
               "Say whether tensors have the forms that others had.\n\n"
               "Parameters\n----------\n"
               "exchange, tensors\n    As for `tensor_forms`.\n"
               "types : tuple of type\n    Of each; another one is none that was asked for.\n"
               "forms : bytes\n    Of `tensor_forms`.\n\n"
               "Returns\n-------\n"
               "bool\n    Whether types, devices, dtypes, shapes and strides are these.\n\n"
               "Raises\n------\n"
               "TypeError, ValueError, BufferError, RuntimeError, ...\n"
               "    As `tensor_forms`.")},
    {NULL, NULL, 0, NULL},
};

bool py_tensor_forms_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
