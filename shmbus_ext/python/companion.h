/* Base of handles for segments beside a bus: pools and channels.
 *
 * Invariant: a call without the interpreter lock, and an object in the segment outliving the
 * handle, counts as a user; the last user ends a handle closed meanwhile. A forked child has no
 * mapping and no lock: a copied description keeps its locks, the parent's proof of life. */
#pragma once

#include "base/bell.h"
#include "base/shared_file.h"
#include "python/list.h"

typedef struct companion CompanionObject;

struct companion_kind {
    const char *noun;
    size_t file_at; /* offset of its struct shared_file in the object */
    enum shared_status (*open)(CompanionObject *self, int fd, bool read_only);
    void (*shut)(CompanionObject *self);    /* drops mapping and locks, before the fd closes */
    void (*isolate)(CompanionObject *self); /* in a forked child */
    struct bell *(*bell)(CompanionObject *self, unsigned int number); /* NULL for a wrong number */
};

struct companion {
    PyObject_HEAD
    const struct companion_kind *kind;
    PyObject *name;
    struct list_link of_all;
    uint32_t generation;
    int pid;
    bool handle_closed;
    uint32_t users;
};

bool py_companion_init_fork(void);
CompanionObject *py_companion_alloc(PyTypeObject *type, const struct companion_kind *kind,
                                    PyObject *name);
void py_companion_dealloc(PyObject *self);
/* open(fd, name, read_only=False) for a type of the given kind. */
PyObject *py_companion_open(PyTypeObject *type, const struct companion_kind *kind, PyObject *args);
/* The handle, or on failure (status, found value); the descriptor then belongs to the caller. */
PyObject *py_companion_result(CompanionObject *self, enum shared_status status);
PyObject *py_companion_close(CompanionObject *self, PyObject *ignored);

/* False with BusClosedError for a handle closed or made before a fork. */
bool py_companion_usable(CompanionObject *self);
/* True if locks and shared memory still belong to this process. */
bool py_companion_is_own(const CompanionObject *self);
void py_companion_add_user(CompanionObject *self);
void py_companion_drop_user(CompanionObject *self);
/* announce(bell): a ticket to wait for the bell's next ring. */
PyObject *py_companion_announce(CompanionObject *self, PyObject *args);
/* wait(bell, ticket, timeout_s): True if the bell rang, after at most an hour. */
PyObject *py_companion_wait(CompanionObject *self, PyObject *args);
/* Raise OSError of errno with the handle's name; return NULL. */
PyObject *py_companion_system_error(CompanionObject *self);
/* The number of a status; NULL with OSError for a system error. */
PyObject *py_companion_status(CompanionObject *self, enum shared_status status);
/* Likewise for a claim: True once claimed, False for a place held elsewhere. */
PyObject *py_companion_claimed(CompanionObject *self, enum shared_status status);
