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

struct words {
    uint64_t *at;
    size_t count, room;
};

static bool add_word(struct words *self, uint64_t word) {
    if (self->count == self->room) {
        size_t room = self->room * 2 + 64;
        uint64_t *grown = PyMem_Realloc(self->at, room * sizeof *grown);
        if (grown == NULL) {
            PyErr_NoMemory();
            return false;
        }
        self->at = grown;
        self->room = room;
    }
    self->at[self->count++] = word;
    return true;
}

static bool add_form(struct words *self, const struct dl_tensor *tensor) {
    bool kept = add_word(self, (uint64_t)(uint32_t)tensor->device_type << 32 |
                                   (uint32_t)tensor->device_id) &&
                add_word(self, (uint64_t)(uint32_t)tensor->ndim << 32 |
                                   (uint32_t)tensor->code << 24 | (uint32_t)tensor->bits << 16 |
                                   tensor->lanes);
    for (int32_t dim = 0; kept && dim < tensor->ndim; dim++) {
        int64_t stride = tensor->strides == NULL ? -1 : tensor->strides[dim];
        kept = add_word(self, (uint64_t)tensor->shape[dim]) && add_word(self, (uint64_t)stride);
    }
    return kept;
}

static bool describe_all(const struct dl_exchange *exchange, PyObject *tensors,
                         struct words *addresses, struct words *forms) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        struct dl_tensor tensor;
        if (exchange->describe(PyTuple_GET_ITEM(tensors, i), &tensor) != 0) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_BufferError, "DLPack: a tensor cannot be described");
            }
            return false;
        }
        if (!add_word(addresses, (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset) ||
            !add_form(forms, &tensor)) {
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
    const struct dl_exchange *exchange = PyCapsule_GetPointer(capsule, EXCHANGE_CAPSULE);
    if (exchange == NULL) {
        return NULL;
    }
    if (exchange->major != EXCHANGE_MAJOR || exchange->describe == NULL) {
        PyErr_Format(PyExc_ValueError, "exchange: expected DLPack %d's table, got one of %u.%u",
                     EXCHANGE_MAJOR, exchange->major, exchange->minor);
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
    {NULL, NULL, 0, NULL},
};

bool py_tensor_forms_add_function(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
