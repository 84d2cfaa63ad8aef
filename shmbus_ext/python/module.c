/* The extension module: its types, the constants that Python shares with C, and the hooks. */
#define SHMBUS_IMPORTS_NUMPY
#include "python/binding.h"
#include "python/uninterrupted.h"

#include "python/put/reservation.h"
#include "python/segment/private_copies.h"
#include "ring/checksum.h"
#include "ring/clock.h"

struct hooks hooks;

void py_raise_hook(PyObject *hook, PyObject *arguments) {
    if (arguments == NULL) {
        return;
    }
    PyObject *error = PyObject_CallObject(hook, arguments);
    Py_DECREF(arguments);
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
}

static PyObject *py_install(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    static char *names[] = {"closed_error", "too_large_error", "full_error",   "busy_error",
                            "removed_error", "layout_error", "space_error", "memory_error",
                            "encode_meta", "decode_meta", "encode_dtype", "decode_dtype",    "as_array",     NULL};
    struct hooks got;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$OOOOOOOOOOOOO", names, &got.closed_error, &got.too_large_error,
            &got.full_error, &got.busy_error, &got.removed_error, &got.layout_error, &got.space_error,
            &got.memory_error, &got.encode_meta, &got.decode_meta, &got.encode_dtype, &got.decode_dtype,
            &got.as_array)) {
        return NULL;
    }
    PyObject **from = (PyObject **)&got;
    PyObject **to = (PyObject **)&hooks;
    for (size_t i = 0; i < sizeof hooks / sizeof *to; i++) {
        Py_XSETREF(to[i], Py_NewRef(from[i]));
    }
    Py_RETURN_NONE;
}

static PyObject *py_crc32c(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data;
    int reference = 0;
    if (!PyArg_ParseTuple(args, "y*|p", &data, &reference)) {
        return NULL;
    }
    uint32_t crc = reference ? shmbus_crc32c_reference(0, data.buf, (size_t)data.len)
                             : shmbus_crc32c(0, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *py_monotonic_ns(PyObject *module, PyObject *ignored) {
    (void)module;
    (void)ignored;
    return PyLong_FromUnsignedLongLong(clock_monotonic_ns());
}

PyObject *py_set_aside_error(void) {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
#endif
}

void py_restore_error(PyObject *error) {
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

/* uninterrupted(callable, *arguments): what it returns; no signal's handler runs meanwhile. */
static PyObject *py_uninterrupted(PyObject *module, PyObject *args) {
    (void)module;
    if (PyTuple_GET_SIZE(args) == 0) {
        PyErr_SetString(PyExc_TypeError, "uninterrupted: expected a callable");
        return NULL;
    }
    PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
    PyObject *result =
        rest == NULL ? NULL : py_call_uninterrupted(PyTuple_GET_ITEM(args, 0), rest);
    Py_XDECREF(rest);
    return result;
}

static PyMethodDef functions[] = {
    {"install", (PyCFunction)(void (*)(void))py_install, METH_VARARGS | METH_KEYWORDS, NULL},
    {"uninterrupted", py_uninterrupted, METH_VARARGS, NULL},
    {"crc32c", py_crc32c, METH_VARARGS, NULL},
    {"monotonic_ns", py_monotonic_ns, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shmbus_ext._core",
    .m_doc = "The C core of shmbus; its types are in _core.pyi.",
    .m_size = -1,
    .m_methods = functions,
};

static bool add_types(PyObject *module) {
    struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {{"Segment", &SegmentType}, {"Writer", &WriterType},
                 {"Reservation", &ReservationType},{"Keeper", &KeeperType},
                 {"Reader", &ReaderType},   {"Borrower", &BorrowerType},
                 {"ClientLease", &ClientLeaseType},
                 {"Pin", &PinType},         {"Schema", &SchemaType},
                 {"Trajectory", &TrajectoryType},
                 {"GroupTable", &GroupTableType},       {"GroupEntry", &GroupEntryType},
                 {"GroupBase", &GroupBaseType},
                 {"RecursiveLock", &RecursiveLockType},     {"Intake", &IntakeType},
                 {"ConsumerBase", &ConsumerBaseType},
                 {"Restorer", &RestorerType}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (PyType_Ready(types[i].type) < 0 ||
            PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type) < 0) {
            return false;
        }
    }
    return true;
}

static bool add_constants(PyObject *module) {
    struct {
        const char *name;
        long value;
    } constants[] = {
        {"LAYOUT_VERSION", SHMBUS_LAYOUT_VERSION},
        {"LAYOUT_HASH", (long)SHMBUS_LAYOUT_HASH},
        {"NO_EPOCH", (long)SHMBUS_NO_EPOCH},
        {"PAGE", SHMBUS_PAGE},
        {"RECORD_ALIGN", SHMBUS_RECORD_ALIGN},
        {"RECORD_HEADER_BYTES", sizeof(struct record_header)},
        {"MAX_ID_BYTES", SHMBUS_MAX_ID_BYTES},
        {"MAX_FIELDS", SHMBUS_MAX_FIELDS},
        {"MAX_NDIM", SHMBUS_MAX_NDIM},
        {"MAX_GROUP_SIZE", SHMBUS_MAX_GROUP_SIZE},
        {"MAX_PRODUCERS", SHMBUS_MAX_PRODUCERS},
        {"LABEL_BYTES", SHMBUS_LABEL_BYTES - 1},               /* less the byte that ends it */
        {"PAUSE_REASON_BYTES", SHMBUS_PAUSE_REASON_BYTES - 1}, /* likewise */
        {"MAX_EXTENTS", SHMBUS_MAX_EXTENTS},
        {"PAUSE_REASON_BYTES", SHMBUS_PAUSE_REASON_BYTES - 1},
        {"MAX_CLIENTS", SHMBUS_MAX_CLIENTS},
        {"PLACE_BYTES", sizeof(struct wire_place)},
        {"SLOT_FREE", SHMBUS_SLOT_FREE},
        {"SLOT_ACTIVE", SHMBUS_SLOT_ACTIVE},
        {"SLOT_CLOSED", SHMBUS_SLOT_CLOSED},
        {"ACKED", SHMBUS_ACKED},
        {"DROP_DUPLICATE", SHMBUS_DROP_DUPLICATE},
        {"DROP_SIZE_MISMATCH", SHMBUS_DROP_SIZE_MISMATCH},
        {"DROP_SURPLUS", SHMBUS_DROP_SURPLUS},
        {"DROP_TIMEOUT", SHMBUS_DROP_TIMEOUT},
        {"DROP_STALE", SHMBUS_DROP_STALE},
        {"DROP_ZERO_VARIANCE", SHMBUS_DROP_ZERO_VARIANCE},
        {"DROP_OVERFLOW", SHMBUS_DROP_OVERFLOW},
        {"DROP_MALFORMED", SHMBUS_DROP_MALFORMED},
        {"DROP_CORRUPT", SHMBUS_DROP_CORRUPT},
        {"DROP_FAILED", SHMBUS_DROP_FAILED},
        {"TRAJECTORY_BYTES", sizeof(TrajectoryObject)},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) {
            return false;
        }
    }
    return true;
}

PyMODINIT_FUNC PyInit__core(void) {
    import_array();
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (!py_segment_init_fork() || !py_arguments_init() || !add_types(module) ||
                           !add_constants(module) || !py_pack_add_functions(module) ||
                           !py_client_lease_add_functions(module) || !py_group_table_add_constants(module) ||
                           !py_group_add_functions(module) || !py_take_add_words() ||
                           !py_retry_add_functions(module) ||
                           !py_meta_search_add_functions(module) || !py_gather_plan_add_functions(module) ||
                           !py_baseline_add_functions(module) || !py_inspect_add_functions(module))) {
        Py_CLEAR(module);
    }
    return module;
}
