/* Calls of a device's driver, several in one, by addresses that the caller has found: nothing of a
 * driver is linked or loaded here.
 *
 * Whoever sends a step has slept since the last one. Each function of torch's that it then goes
 * through costs some 20 us, as its code and data come from far away; these are the few that are
 * needed.
 *
 * Invariants: the interpreter lock is not held while the driver works; what a call of the driver
 * refuses ends the rest. */
#include "python/device/device_calls.h"

#include <string.h>
#include <time.h>

#include "base/clock.h"

/* Of one call; what has more is copied otherwise. */
#define DEVICE_MAX_COPIES 64
/* cuda.h's CUDA_ERROR_NOT_READY. */
#define DEVICE_NOT_READY 600
#define NS_PER_S INT64_C(1000000000)
/* A sleep between two looks is this part of what has passed, so that the end is seen late by no more
 * than that. */
#define NAP_PART 16
#define SHORTEST_NAP_NS INT64_C(50000)
#define LONGEST_NAP_NS INT64_C(1000000)

/* Of one launch: addresses and numbers. */
#define DEVICE_MAX_PARAMETERS 32
/* A Triton kernel has two more behind its own: memory of which it is given none. */
#define DEVICE_SCRATCH_PARAMETERS 2

/* cuMemcpyDtoDAsync, cuEventRecord, cuEventQuery and cuLaunchKernel. */
typedef int (*copy_call)(uint64_t to, uint64_t from, size_t bytes, void *stream);
typedef int (*record_call)(void *event, void *stream);
typedef int (*query_call)(void *event);
typedef int (*launch_call)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                           unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                           void *stream, void **parameters, void **extra);

struct copy_of {
    uint64_t to;
    uint64_t from;
    size_t bytes;
};

static bool address_of(PyObject *number, void **into) {
    *into = PyLong_AsVoidPtr(number);
    return !PyErr_Occurred();
}

static bool source_of(PyObject *tensor, uint64_t *into) {
    PyObject *number = PyObject_CallMethod(tensor, "data_ptr", NULL);
    *into = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(number);
    return !PyErr_Occurred();
}

/* The copies of tensors, in the dictionary's order, into targets: a tuple of (address, bytes). */
static Py_ssize_t find_copies(PyObject *tensors, PyObject *targets, struct copy_of *into) {
    if (!PyDict_Check(tensors) || !PyTuple_CheckExact(targets) ||
        PyDict_GET_SIZE(tensors) != PyTuple_GET_SIZE(targets) ||
        PyTuple_GET_SIZE(targets) > DEVICE_MAX_COPIES) {
        PyErr_Format(PyExc_ValueError,
                     "device_copy: expected a dict of at most %d tensors, and a tuple of as many "
                     "targets",
                     DEVICE_MAX_COPIES);
        return -1;
    }
    Py_ssize_t place = 0, count = 0;
    PyObject *name, *tensor;
    while (count < PyTuple_GET_SIZE(targets) && PyDict_Next(tensors, &place, &name, &tensor)) {
        unsigned long long to, bytes;
        Py_INCREF(tensor); /* data_ptr may be code of others */
        bool found = PyArg_ParseTuple(PyTuple_GET_ITEM(targets, count), "KK", &to, &bytes) &&
                     source_of(tensor, &into[count].from);
        Py_DECREF(tensor);
        if (!found) {
            return -1;
        }
        into[count].to = to;
        into[count++].bytes = (size_t)bytes;
    }
    return count;
}

/* device_copy(copy, record, stream, event, tensors, targets): begins the copies on the stream, and
 * records the event behind them. 0, or the status of the driver's first call that refused. */
static PyObject *py_device_copy(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    void *calls[4]; /* copy, record, stream, event */
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "device_copy: expected 6 arguments");
        return NULL;
    }
    for (int i = 0; i < 4; i++) {
        if (!address_of(args[i], &calls[i])) {
            return NULL;
        }
    }
    struct copy_of copies[DEVICE_MAX_COPIES];
    Py_ssize_t found = find_copies(args[4], args[5], copies);
    if (found < 0) {
        return NULL;
    }
    copy_call copy = (copy_call)(uintptr_t)calls[0];
    record_call record = (record_call)(uintptr_t)calls[1];
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; status == 0 && i < found; i++) {
        status = copy(copies[i].to, copies[i].from, copies[i].bytes, calls[2]);
    }
    if (status == 0) {
        status = record(calls[3], calls[2]);
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

/* Looks at an event until it has happened: so long without sleeping, and then, where it may, now and
 * then. */
static int await_event(query_call query, void *event, int64_t busy_ns, bool naps) {
    int64_t began = (int64_t)clock_monotonic_ns();
    for (;;) {
        int status = query(event);
        if (status != DEVICE_NOT_READY) {
            return status;
        }
        int64_t passed = (int64_t)clock_monotonic_ns() - began;
        if (passed < busy_ns) {
            continue;
        }
        if (!naps) {
            return status;
        }
        int64_t nap = passed / NAP_PART;
        nap = nap < SHORTEST_NAP_NS ? SHORTEST_NAP_NS : nap > LONGEST_NAP_NS ? LONGEST_NAP_NS : nap;
        struct timespec pause = {0, nap};
        (void)nanosleep(&pause, NULL);
    }
}

/* device_await(query, event, busy_s, naps): waits until the event has happened; where it may not
 * sleep, for busy_s. 0, DEVICE_NOT_READY, or why the driver says no. */
static PyObject *py_device_await(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *query, *event;
    double busy_s;
    int naps, status;
    void *calls[2];
    if (!PyArg_ParseTuple(args, "OOdp", &query, &event, &busy_s, &naps) ||
        !address_of(query, &calls[0]) || !address_of(event, &calls[1])) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = await_event((query_call)(uintptr_t)calls[0], calls[1],
                         (int64_t)(busy_s * (double)NS_PER_S), naps != 0);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

/* What a kernel is given: addresses, then numbers, then no scratch memory. */
struct parameters {
    uint64_t values[DEVICE_MAX_PARAMETERS + DEVICE_SCRATCH_PARAMETERS];
    void *places[DEVICE_MAX_PARAMETERS + DEVICE_SCRATCH_PARAMETERS];
};

static bool set_parameters(struct parameters *self, PyObject *addresses, PyObject *numbers) {
    Py_ssize_t first = PyTuple_GET_SIZE(addresses), all = first + PyTuple_GET_SIZE(numbers);
    if (all > DEVICE_MAX_PARAMETERS) {
        PyErr_Format(PyExc_ValueError, "device_launch: expected at most %d parameters, got %zd",
                     DEVICE_MAX_PARAMETERS, all);
        return false;
    }
    for (Py_ssize_t i = 0; i < all + DEVICE_SCRATCH_PARAMETERS; i++) {
        self->values[i] = 0;
        self->places[i] = &self->values[i];
        if (i < first) {
            self->values[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(addresses, i));
        } else if (i < all) {
            long number = PyLong_AsLong(PyTuple_GET_ITEM(numbers, i - first));
            int32_t narrow = (int32_t)number;
            memcpy(&self->values[i], &narrow, sizeof narrow);
            if (!PyErr_Occurred() && narrow != number) {
                PyErr_SetString(PyExc_OverflowError, "device_launch: a number has over 32 bits");
            }
        }
        if (PyErr_Occurred()) {
            return false;
        }
    }
    return true;
}

/* device_launch(launch, function, stream, grid, threads, shared, addresses, numbers): starts a
 * kernel. 0, or why the driver says no. */
static PyObject *py_device_launch(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *launch, *function, *stream, *addresses, *numbers;
    unsigned grid, threads, shared;
    void *calls[3];
    struct parameters parameters;
    if (!PyArg_ParseTuple(args, "OOOIIIO!O!", &launch, &function, &stream, &grid, &threads,
                          &shared, &PyTuple_Type, &addresses, &PyTuple_Type, &numbers) ||
        !address_of(launch, &calls[0]) || !address_of(function, &calls[1]) ||
        !address_of(stream, &calls[2]) || !set_parameters(&parameters, addresses, numbers)) {
        return NULL;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = ((launch_call)(uintptr_t)calls[0])(calls[1], grid, 1, 1, threads, 1, 1, shared,
                                                calls[2], parameters.places, NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static PyMethodDef functions[] = {
    {"device_launch", py_device_launch, METH_VARARGS,
     PyDoc_STR(
         "device_launch(launch, function, stream, grid, threads, shared, addresses, numbers)\n--\n\n"
         "Start a kernel on a stream of a device.\n\n"
         "Parameters\n----------\n"
         "launch : int\n    Address of the driver's cuLaunchKernel.\n"
         "function, stream : int\n    As the driver knows them.\n"
         "grid, threads : int\n    Blocks, and threads of each.\n"
         "shared : int\n    Bytes of shared memory of a block.\n"
         "addresses, numbers : tuple of int\n    The kernel's parameters: first those of 64 bits, "
         "then those of 32; behind them it is\n    given two that are 0.\n\n"
         "Returns\n-------\n"
         "int\n    0, or the status of the driver's error.\n\n"
         "Raises\n------\n"
         "TypeError, ValueError, OverflowError\n    An argument is none, or there are too many.")},
    {"device_copy", (PyCFunction)(void (*)(void))py_device_copy, METH_FASTCALL,
     PyDoc_STR(
         "device_copy(copy, record, stream, event, tensors, targets)\n--\n\n"
         "Begin copies on a stream of a device, and record an event behind them, in one call.\n\n"
         "Parameters\n----------\n"
         "copy, record : int\n    Addresses of the driver's cuMemcpyDtoDAsync and cuEventRecord.\n"
         "stream, event : int\n    As the driver knows them; the event is recorded.\n"
         "tensors : dict\n    At most `DEVICE_MAX_COPIES`, in order; each with `data_ptr()`.\n"
         "targets : tuple of (int, int)\n    Address and bytes of each.\n\n"
         "Returns\n-------\n"
         "int\n    0, or the status of the driver's first call that refused.\n\n"
         "Raises\n------\n"
         "TypeError, ValueError\n    An argument is none, or there are too many.")},
    {"device_await", py_device_await, METH_VARARGS,
     PyDoc_STR(
         "device_await(query, event, busy_s, naps)\n--\n\n"
         "Wait until an event of a device has happened, without the interpreter's lock.\n\n"
         "Parameters\n----------\n"
         "query : int\n    Address of the driver's cuEventQuery.\n"
         "event : int\n    As the driver knows it.\n"
         "busy_s : float\n    Seconds to look without sleeping.\n"
         "naps : bool\n    Whether to go on after that, sleeping in between.\n\n"
         "Returns\n-------\n"
         "int\n    0; `DEVICE_NOT_READY` where it has not happened; or the driver's status of an "
         "error.")},
    {NULL, NULL, 0, NULL},
};

bool py_device_add_functions(PyObject *module) {
    return PyModule_AddIntConstant(module, "DEVICE_MAX_COPIES", DEVICE_MAX_COPIES) == 0 &&
           PyModule_AddIntConstant(module, "DEVICE_NOT_READY", DEVICE_NOT_READY) == 0 &&
           PyModule_AddFunctions(module, functions) == 0;
}
