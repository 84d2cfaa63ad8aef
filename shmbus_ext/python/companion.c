/* Opening, closing and forking of pools and channels (see companion.h). */
#include "python/companion.h"

#include <pthread.h>
#include <unistd.h>

#include "python/hooks.h"
#include "python/segment/segment.h"

static struct list_link all_companions = {&all_companions, &all_companions};

static struct shared_file *file_of(const CompanionObject *self) {
    return (struct shared_file *)(void *)((char *)self + self->kind->file_at);
}

static void after_fork_in_child(void) {
    for (struct list_link *l = all_companions.next; l != &all_companions; l = l->next) {
        CompanionObject *self = LIST_ENTRY(l, CompanionObject, of_all);
        self->kind->isolate(self);
        if (file_of(self)->fd >= 0) {
            close(file_of(self)->fd);
            file_of(self)->fd = -1;
        }
    }
}

bool py_companion_init_fork(void) {
    return pthread_atfork(NULL, NULL, after_fork_in_child) == 0;
}

bool py_companion_is_own(const CompanionObject *self) {
    return self->generation == fork_generation && file_of(self)->fd >= 0;
}

bool py_companion_usable(CompanionObject *self) {
    return py_handle_usable(self->kind->noun, self->name, "handle", self->generation, self->pid,
                            self->handle_closed);
}

static void shut(CompanionObject *self) {
    struct shared_file *file = file_of(self);
    self->kind->shut(self);
    if (file->fd >= 0) {
        close(file->fd);
        file->fd = -1;
    }
}

void py_companion_add_user(CompanionObject *self) {
    Py_INCREF(self);
    self->users++;
}

void py_companion_drop_user(CompanionObject *self) {
    self->users--;
    if (self->users == 0 && self->handle_closed) {
        shut(self);
    }
    Py_DECREF(self);
}

CompanionObject *py_companion_alloc(PyTypeObject *type, const struct companion_kind *kind,
                                    PyObject *name) {
    CompanionObject *self = (CompanionObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->kind = kind;
        file_of(self)->fd = -1;
        self->name = Py_NewRef(name);
        self->generation = fork_generation;
        self->pid = (int)getpid();
        list_insert_before(&all_companions, &self->of_all);
    }
    return self;
}

void py_companion_dealloc(PyObject *object) {
    CompanionObject *self = (CompanionObject *)object;
    list_unlink(&self->of_all);
    shut(self); /* without a message: the peers see the dropped locks */
    Py_XDECREF(self->name);
    Py_TYPE(self)->tp_free(object);
}

PyObject *py_companion_system_error(CompanionObject *self) {
    return py_raise_system(self->kind->noun, self->name);
}

PyObject *py_companion_result(CompanionObject *self, enum shared_status status) {
    struct shared_file *file = file_of(self);
    if (status == SHARED_OK) {
        return (PyObject *)self;
    }
    unsigned long long found = status == SHARED_TRUNCATED ? file->found_bytes : file->found_version;
    PyObject *result = NULL;
    if (status == SHARED_SYSTEM_ERROR || status == SHARED_NO_MEMORY) {
        (void)py_companion_system_error(self);
    } else {
        result = Py_BuildValue("(iK)", (int)status, found);
    }
    file->fd = -1;
    Py_DECREF(self);
    return result;
}

PyObject *py_companion_open(PyTypeObject *type, const struct companion_kind *kind, PyObject *args) {
    int fd, read_only = 0;
    PyObject *name;
    if (!PyArg_ParseTuple(args, "iU|p", &fd, &name, &read_only)) {
        return NULL;
    }
    CompanionObject *self = py_companion_alloc(type, kind, name);
    return self == NULL ? NULL : py_companion_result(self, kind->open(self, fd, read_only != 0));
}

PyObject *py_companion_close(CompanionObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!self->handle_closed) {
        self->handle_closed = true;
        if (self->users == 0) {
            shut(self);
        }
    }
    Py_RETURN_NONE;
}

PyObject *py_companion_status(CompanionObject *self, enum shared_status status) {
    return status == SHARED_SYSTEM_ERROR ? py_companion_system_error(self)
                                         : PyLong_FromLong(status);
}

PyObject *py_companion_claimed(CompanionObject *self, enum shared_status status) {
    return status == SHARED_SYSTEM_ERROR ? py_companion_system_error(self)
                                         : PyBool_FromLong(status == SHARED_OK);
}

/* A bell of a usable handle; NULL with an exception. */
static struct bell *bell_of(CompanionObject *self, unsigned int number) {
    struct bell *bell = py_companion_usable(self) ? self->kind->bell(self, number) : NULL;
    NEVER(bell == NULL && !PyErr_Occurred(), NULL);
    return bell;
}

PyObject *py_companion_announce(CompanionObject *self, PyObject *args) {
    unsigned int number;
    struct bell *bell = PyArg_ParseTuple(args, "I", &number) ? bell_of(self, number) : NULL;
    return bell == NULL ? NULL : PyLong_FromUnsignedLong(bell_announce(bell));
}

PyObject *py_companion_wait(CompanionObject *self, PyObject *args) {
    unsigned int number, ticket;
    double timeout_s;
    struct bell *bell =
        PyArg_ParseTuple(args, "IId", &number, &ticket, &timeout_s) ? bell_of(self, number) : NULL;
    if (bell == NULL) {
        return NULL;
    }
    timeout_s = timeout_s > 0 ? timeout_s < 3600 ? timeout_s : 3600 : 0;
    enum bell_wait result;
    py_companion_add_user(self); /* a second thread may close the handle meanwhile */
    Py_BEGIN_ALLOW_THREADS
    result = bell_wait(bell, ticket, (int64_t)(timeout_s * 1e9));
    Py_END_ALLOW_THREADS
    py_companion_drop_user(self);
    if (result == BELL_INTERRUPTED && Py_MakePendingCalls() != 0) {
        return NULL;
    }
    return PyBool_FromLong(result == BELL_RUNG);
}
