/* ChannelForm: how steps that are alike lie in a slot, and tensors to it and from it. */
#ifndef SHMBUS_PYTHON_CHANNEL_CHANNEL_FORM_H
#define SHMBUS_PYTHON_CHANNEL_CHANNEL_FORM_H

#include "python/binding.h"
#include "python/channel/channel.h"

/* Of one step; what has more goes another way. */
#define CHANNEL_FORM_MAX_TENSORS 1024
/* Copied with the interpreter lock held: at 5 GB/s some 50 us, less than it takes to hand the lock
 * to another thread and to get it back. */
#define CHANNEL_FORM_MAX_BYTES (256u << 10)

struct form_tensor {
    PyObject *name;
    PyObject *dtype;
    PyObject *shape; /* a tuple of int */
    uint64_t offset;
    uint64_t bytes;
    uint8_t dl_code; /* what DLPack calls the dtype */
    uint8_t dl_bits;
};

typedef struct {
    PyObject_VAR_HEAD
    PyObject *head;       /* bytes, with which the meta of such a step begins */
    PyObject *tensor_type;
    PyObject *from_dlpack;
    bool refused; /* from_dlpack has raised: not asked again */
    uint64_t bytes;
    Py_ssize_t count; /* of those that are set: all, once it is made */
    struct form_tensor tensors[];
} ChannelFormObject;

extern PyTypeObject ChannelFormType;

struct form_found {
    Py_ssize_t count;
    PyObject *kept[CHANNEL_FORM_MAX_TENSORS]; /* so that no other code frees what was found */
    const uint8_t *at[CHANNEL_FORM_MAX_TENSORS];
};
/* Where each tensor of a dictionary lies; false where it is not of this form, without an exception
 * unless one is to end the call (an interrupt). It may run code of others: what the caller looked at before may have changed. */
bool py_channel_form_find(ChannelFormObject *self, PyObject *tensors, struct form_found *found);
void py_channel_form_let_go(struct form_found *found);
/* Tensors over a payload, by name; NULL where there can be none, the same of exceptions. It may run
 * code of others too. */
PyObject *py_channel_form_view(ChannelFormObject *self, ChannelMemoryObject *memory);

#endif
