/* PoolWrite: a version of a slot pool while it is being written. */
#ifndef SHMBUS_PYTHON_POOL_POOL_WRITE_H
#define SHMBUS_PYTHON_POOL_POOL_WRITE_H

#include "python/binding.h"
#include "python/pool/pool_object.h"
#include "pool/patch.h"

typedef struct {
    PyObject_HEAD
    PoolObject *pool;
    uint32_t slot;
    bool is_piece; /* another rank is the publisher */
    bool ended;
    bool given_up;
    Py_ssize_t buffers; /* out, and calls that write without one */
    unsigned long long sequence, bytes;
    long long version;
    PyObject *meta;
    struct patch_maker patch;
    bool patch_in_use; /* by a thread that runs without the interpreter's lock */
} PoolWriteObject;

/* False with BufferError where the version is not being written any more. */
bool py_pool_write_is_open(const PoolWriteObject *self);
/* A writer came, or went: a slot is not let go while there is one. */
void py_pool_write_enter(PoolWriteObject *self);
void py_pool_write_leave(PoolWriteObject *self);

extern PyTypeObject PoolWriteType;

bool py_pool_write_add_functions(PyObject *module);

#endif
