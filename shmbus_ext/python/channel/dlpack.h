/* The part of DLPack 0.x that is needed to give memory to a library of tensors, as its ABI has it
 * (github.com/dmlc/dlpack, dlpack.h). A capsule "dltensor" holds a DLManagedTensor until a consumer
 * has renamed it; then the consumer calls the deleter. */
#ifndef SHMBUS_PYTHON_CHANNEL_DLPACK_H
#define SHMBUS_PYTHON_CHANNEL_DLPACK_H

#include <stdint.h>

#define DLPACK_CAPSULE "dltensor"
#define DLPACK_CPU 1

struct dlpack_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
};

struct dlpack_managed {
    struct dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct dlpack_managed *self);
};
_Static_assert(sizeof(struct dlpack_managed) == 64, "the ABI of DLPack on 64 bits");

#endif
