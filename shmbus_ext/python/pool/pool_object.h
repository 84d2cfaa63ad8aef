/* SlotPool: one mapping of a slot pool, and what happens to it at fork and at close. */
#ifndef SHMBUS_PYTHON_POOL_POOL_OBJECT_H
#define SHMBUS_PYTHON_POOL_POOL_OBJECT_H

#include "python/binding.h"
#include "python/list.h"
#include "python/system_error.h"
#include "pool/pool.h"

typedef struct {
    PyObject_HEAD
    struct pool c;
    PyObject *name;
    struct list_link of_all;
    uint32_t generation;
    int pid;
    bool handle_closed;
    uint32_t users; /* leases and writes; the last one ends a pool whose handle is closed */
} PoolObject;

extern PyTypeObject PoolType;

/* False with BusClosedError where the handle is closed or from before a fork. */
bool py_pool_usable(PoolObject *self);
/* Whether locks and shared memory are still this process's. */
bool py_pool_is_own(const PoolObject *self);
/* For what lies in the pool and outlives the handle. */
void py_pool_add_user(PoolObject *self);
void py_pool_drop_user(PoolObject *self);

bool py_pool_init_fork(void);
bool py_pool_add_constants(PyObject *module);

#endif
