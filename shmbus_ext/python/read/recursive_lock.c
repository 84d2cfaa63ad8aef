/* RecursiveLock: a recursive lock; C takes a free lock without a call.
 *
 * Invariant: `depth`, `owner` and `waiting` change only under the interpreter lock: a thread
 * finding the lock free owns the lock before a second thread can look. Waiting threads block at the
 * gate, closed except while letting a thread through. A free-threaded module must declare its need
 * of the interpreter lock. A forked child holds no lock of the parent's threads. */
#include "python/read/read.h"

/* Reset in a forked child: only the forking thread survives to release the lock. Leave the old gate
 * alone, whatever its state. */
static bool make_new(RecursiveLockObject *self, unsigned long me) {
    PyThread_type_lock gate = PyThread_allocate_lock();
    if (gate == NULL) {
        PyErr_NoMemory();
        return false;
    }
    PyThread_acquire_lock(gate, NOWAIT_LOCK);
    self->gate = gate;
    self->waiting = 0;
    if (self->owner != me) {
        self->depth = 0;
    }
    self->generation = fork_generation;
    return true;
}

bool py_recursive_lock_acquire(RecursiveLockObject *self) {
    unsigned long me = PyThread_get_thread_ident();
    if (self->generation != fork_generation && !make_new(self, me)) {
        return false;
    }
    while (self->depth > 0 && self->owner != me) {
        PyLockStatus status;
        self->waiting++;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(self->gate, -1, 1);
        Py_END_ALLOW_THREADS
        self->waiting--;
        if (status == PY_LOCK_INTR && Py_MakePendingCalls() < 0) {
            return false;
        }
    }
    self->owner = me;
    self->depth++;
    return true;
}

void py_recursive_lock_release(RecursiveLockObject *self) {
    self->depth--;
    if (self->depth == 0 && self->waiting > 0) {
        /* Several releases before the first waiter runs need only one opening. */
        PyThread_acquire_lock(self->gate, NOWAIT_LOCK);
        PyThread_release_lock(self->gate);
    }
}

static PyObject *py_recursive_lock_enter(RecursiveLockObject *self, PyObject *Py_UNUSED(ignored)) {
    return py_recursive_lock_acquire(self) ? Py_NewRef((PyObject *)self) : NULL;
}

static PyObject *py_recursive_lock_exit(RecursiveLockObject *self, PyObject *const *Py_UNUSED(args),
                                        Py_ssize_t Py_UNUSED(count)) {
    NEVER(self->depth == 0 || self->owner != PyThread_get_thread_ident(), NULL);
    py_recursive_lock_release(self);
    Py_RETURN_NONE;
}

static PyObject *py_recursive_lock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", names)) {
        return NULL;
    }
    RecursiveLockObject *self = (RecursiveLockObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->gate = PyThread_allocate_lock();
    if (self->gate == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    PyThread_acquire_lock(self->gate, NOWAIT_LOCK);
    self->generation = fork_generation;
    return (PyObject *)self;
}

static void py_recursive_lock_dealloc(RecursiveLockObject *self) {
    if (self->gate != NULL && self->generation == fork_generation) {
        PyThread_release_lock(self->gate);
        PyThread_free_lock(self->gate);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Context manager of `with lock.attempt() as mine`: holds the lock for the block if free at
 * entry. */
typedef struct {
    PyObject_HEAD
    RecursiveLockObject *lock;
    bool mine;
} AttemptObject;

static PyObject *py_recursive_lock_attempt(RecursiveLockObject *self,
                                           PyObject *Py_UNUSED(ignored)) {
    AttemptObject *attempt = PyObject_New(AttemptObject, &LockAttemptType);
    if (attempt != NULL) {
        attempt->lock = (RecursiveLockObject *)Py_NewRef((PyObject *)self);
        attempt->mine = false;
    }
    return (PyObject *)attempt;
}

static PyObject *py_attempt_enter(AttemptObject *self, PyObject *Py_UNUSED(ignored)) {
    const RecursiveLockObject *lock = self->lock;
    if (lock->generation != fork_generation || lock->depth == 0 ||
        lock->owner == PyThread_get_thread_ident()) {
        /* Free, or held by this thread: acquire without waiting. */
        self->mine = py_recursive_lock_acquire(self->lock);
    }
    return PyErr_Occurred() ? NULL : PyBool_FromLong(self->mine);
}

static PyObject *py_attempt_exit(AttemptObject *self, PyObject *const *Py_UNUSED(args),
                                 Py_ssize_t Py_UNUSED(count)) {
    if (self->mine) {
        self->mine = false;
        py_recursive_lock_release(self->lock);
    }
    Py_RETURN_NONE;
}

static void py_attempt_dealloc(AttemptObject *self) {
    Py_DECREF(self->lock);
    PyObject_Free(self);
}

static PyMethodDef attempt_methods[] = {
    METHOD("__enter__", py_attempt_enter, METH_NOARGS, NULL),
    METHOD("__exit__", py_attempt_exit, METH_FASTCALL, NULL),
    {NULL, NULL, 0, NULL},
};

PyTypeObject LockAttemptType = {
    TYPE_BASICS("LockAttempt", AttemptObject, py_attempt_dealloc, 0),
    .tp_methods = attempt_methods,
};

static PyMethodDef recursive_lock_methods[] = {
    METHOD("__enter__", py_recursive_lock_enter, METH_NOARGS, NULL),
    METHOD("__exit__", py_recursive_lock_exit, METH_FASTCALL, NULL),
    METHOD("attempt", py_recursive_lock_attempt, METH_NOARGS, NULL),
    {NULL, NULL, 0, NULL},
};

PyTypeObject RecursiveLockType = {
    TYPE_BASICS("RecursiveLock", RecursiveLockObject, py_recursive_lock_dealloc, 0),
    .tp_methods = recursive_lock_methods,
    .tp_new = py_recursive_lock_new,
};
