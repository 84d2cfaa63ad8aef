/* The extension module: types, functions and constants shared by Python and C. */
#define SHMBUS_IMPORTS_NUMPY

#include "base/checksum.h"
#include "base/clock.h"
#include "python/batch/batch.h"
#include "python/channel/channel.h"
#include "python/companion.h"
#include "python/group/group.h"
#include "python/hooks.h"
#include "python/pool/pool.h"
#include "python/put/put.h"
#include "python/read/read.h"
#include "python/record/record.h"
#include "python/segment/segment.h"

static PyObject *py_crc32c(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer data;
    int reference = 0;
    if (!PyArg_ParseTuple(args, "y*|p", &data, &reference)) {
        return NULL;
    }
    uint32_t crc;
    Py_BEGIN_ALLOW_THREADS
    crc = reference ? shmbus_crc32c_reference(0, data.buf, (size_t)data.len)
                    : shmbus_crc32c(0, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *py_monotonic_ns(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLongLong(clock_monotonic_ns());
}

static PyMethodDef functions[] = {
    {"crc32c", py_crc32c, METH_VARARGS, NULL},
    {"monotonic_ns", py_monotonic_ns, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static bool add_types(PyObject *module) {
    struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {
        {"Segment", &SegmentType},         {"Restorer", &RestorerType},
        {"Schema", &SchemaType},           {"Keeper", &KeeperType},
        {"Pin", &PinType},                 {"Trajectory", &TrajectoryType},
        {"OriginHead", &OriginHeadType},
        {"Writer", &WriterType},           {"Reservation", &ReservationType},
        {"GroupTable", &GroupTableType},   {"GroupEntry", &GroupEntryType},
        {"GroupBase", &GroupBaseType},     {"ClientLease", &ClientLeaseType},
        {"Reader", &ReaderType},           {"Borrower", &BorrowerType},
        {"RecursiveLock", &RecursiveLockType}, {"LockAttempt", &LockAttemptType},
        {"Intake", &IntakeType},           {"ConsumerBase", &ConsumerBaseType},
        {"SlotPool", &PoolType},           {"PoolLease", &PoolLeaseType},
        {"PoolWrite", &PoolWriteType},
        {"Channel", &ChannelType},         {"ChannelMemory", &ChannelMemoryType},
        {"ClosedByBlock", &ClosedByBlockType},
        {"DeclaredSchema", &DeclaredSchemaType}, {"PackPlan", &PackPlanType},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (PyType_Ready(types[i].type) < 0 ||
            PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type) < 0) {
            return false;
        }
    }
    return true;
}

static const struct named_value constants[] = {
    {"LAYOUT_VERSION", SHMBUS_LAYOUT_VERSION},
    {"LAYOUT_HASH", (long)SHMBUS_LAYOUT_HASH},
    {"NO_ROUND", (long)SHMBUS_NO_ROUND},
    {"PAGE", SHMBUS_PAGE},
    {"RECORD_ALIGN", SHMBUS_RECORD_ALIGN},
    {"RECORD_HEADER_BYTES", sizeof(struct record_header)},
    {"MAX_ID_BYTES", SHMBUS_MAX_ID_BYTES},
    {"MAX_FIELDS", SHMBUS_MAX_FIELDS},
    {"MAX_NDIM", SHMBUS_MAX_NDIM},
    {"MAX_GROUP_SIZE", SHMBUS_MAX_GROUP_SIZE},
    {"MAX_PRODUCERS", SHMBUS_MAX_PRODUCERS},
    {"MAX_DIMENSION_NAMES", SHMBUS_MAX_DIMENSION_NAMES},
    {"MAX_DECLARED_BYTES", SHMBUS_DECLARED_BYTES},
    {"DECLARED_OPTIONAL", SHMBUS_DECLARED_OPTIONAL},
    {"DECLARED_ANY_SHAPE", SHMBUS_DECLARED_ANY_SHAPE},
    {"DIMENSION_FREE", (long)SHMBUS_DIMENSION_FREE},
    {"DIMENSION_NAMED", (long)SHMBUS_DIMENSION_NAMED},
    {"LABEL_BYTES", SHMBUS_LABEL_BYTES - 1},               /* less the terminating byte */
    {"PAUSE_REASON_BYTES", SHMBUS_PAUSE_REASON_BYTES - 1}, /* likewise */
    {"MAX_EXTENTS", SHMBUS_MAX_EXTENTS},
    {"MAX_CLIENTS", SHMBUS_MAX_CLIENTS},
    {"PLACE_BYTES", sizeof(struct wire_place)},
    {"SLOT_FREE", SHMBUS_SLOT_FREE},
    {"SLOT_ACTIVE", SHMBUS_SLOT_ACTIVE},
    {"SLOT_CLOSED", SHMBUS_SLOT_CLOSED},
    {"ACKED", SHMBUS_ACKED},
    {"DROP_DUPLICATE", SHMBUS_DROP_DUPLICATE},
    {"DROP_MALFORMED", SHMBUS_DROP_MALFORMED},
    {"DROP_CORRUPT", SHMBUS_DROP_CORRUPT},
    {"DROP_FAILED", SHMBUS_DROP_FAILED},
    {"DROP_FILTERED", SHMBUS_DROP_FILTERED},
    {"RELAYED", SHMBUS_RELAYED},
    {"LEASE_HELD", LEASE_HELD},
    {NULL, 0},
};

static bool add_constants(PyObject *module) {
    const struct named_value *const tables[] = {
        constants,                 py_waits_constants,
        py_channel_constants,      py_companion_constants,
        py_delivery_constants,     py_export_constants,
        py_extra_fields_constants, py_kernel_table_constants,
        py_group_table_constants,  py_inspect_constants,
        py_pool_constants,         py_relay_constants,
        py_request_constants,      py_retry_constants,
        py_splits_constants,
    };
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        for (const struct named_value *each = tables[i]; each->name != NULL; each++) {
            if (PyModule_AddIntConstant(module, each->name, each->value) < 0) {
                return false;
            }
        }
    }
    return true;
}

static bool add_functions(PyObject *module) {
    PyMethodDef *const tables[] = {
        py_arrays_functions,           py_waits_functions,
        py_channel_messages_functions, py_client_lease_functions,
        py_convert_functions,          py_declared_functions,
        py_delivery_functions,         py_end_lease_functions,
        py_export_functions,
        py_hooks_functions,            py_import_functions,
        py_inspect_functions,          py_origin_head_functions,
        py_pool_lease_functions,
        py_pool_patch_functions,       py_pool_rows_functions,
        py_relay_functions,            py_request_functions,
        py_retry_functions,            py_splits_functions,
        py_uninterrupted_functions,
    };
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            return false;
        }
    }
    return true;
}

static bool add_objects(PyObject *module) {
    bool (*const add[])(PyObject *) = {
        py_inspect_add_objects,      py_group_add_objects,
        py_client_lease_add_objects, py_kernel_table_add_objects,
        py_plan_add_objects,         py_delivery_add_objects,
        py_waits_add_objects,        py_splits_add_objects,
        py_plan_fields_add_constants, py_arguments_add_constants,
    };
    for (size_t i = 0; i < sizeof add / sizeof *add; i++) {
        if (!add[i](module)) {
            return false;
        }
    }
    return true;
}

/* Types, interned words and the hooks into shmbus's errors exist once per process. */
static bool require_main_interpreter(void) {
    if (PyInterpreterState_Get() == PyInterpreterState_Main()) {
        return true;
    }
    return py_refuse(
        PyExc_ImportError,
        "shmbus: expected a process's main interpreter, got a subinterpreter; run what "
        "uses shmbus in a process of its own (multiprocessing, "
        "concurrent.futures.ProcessPoolExecutor), or in a thread of the main one");
}

static int execute(PyObject *module) {
    /* Prepare once per process, even after a repeated import. */
    static bool prepared;
    if (!require_main_interpreter()) {
        return -1;
    }
    import_array1(-1);
    if (!prepared && (!py_segment_init_fork() || !py_companion_init_fork() ||
                      !py_arguments_init() || !py_plan_fields_init() || !py_take_add_words() ||
                      !py_closing_init() || !py_arrival_init())) {
        return -1;
    }
    prepared = true;
    return add_types(module) && add_constants(module) && add_functions(module) &&
                   add_objects(module)
               ? 0
               : -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#if PY_VERSION_HEX >= 0x030C0000
    /* `execute` refuses subinterpreters, with an explanation. */
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_GIL_DISABLED
    /* RecursiveLock and every structure under "the interpreter lock" depend on the GIL. */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shmbus_ext._core",
    .m_doc = "The C core of shmbus; its types are in _core.pyi.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) {
    return PyModuleDef_Init(&definition);
}
