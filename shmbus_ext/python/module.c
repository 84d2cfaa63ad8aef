/* The extension module: types, functions and constants shared by Python and C. */
#define SHMBUS_IMPORTS_NUMPY

#include "base/checksum.h"
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
    if (!PyArg_ParseTuple(args, "y*", &data)) {
        return NULL;
    }
    uint32_t crc;
    Py_BEGIN_ALLOW_THREADS
    crc = shmbus_crc32c(0, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef functions[] = {
    {"crc32c", py_crc32c, METH_VARARGS, NULL},
    METHOD("install", py_install, METH_VARARGS | METH_KEYWORDS, NULL),
    {"pool_lease", py_pool_lease, METH_VARARGS, NULL},
    {"convert_field", py_convert_field, METH_VARARGS, NULL},
    {"note_waited", py_note_waited, METH_VARARGS, NULL},
    METHOD("declared_bytes", py_declared_bytes, METH_O, NULL),
    {"uninterrupted", py_uninterrupted, METH_VARARGS, NULL},
    {"finalizer", py_finalizer, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static bool add_types(PyObject *module) {
    static PyTypeObject *const types[] = {
        &SegmentType, &RestorerType, &SchemaType, &KeeperType, &PinType, &TrajectoryType,
        &OriginHeadType, &WriterType, &ReservationType, &GroupTableType, &GroupEntryType,
        &GroupBaseType, &ClientLeaseType, &ReaderType, &BorrowerType, &RecursiveLockType,
        &LockAttemptType, &IntakeType, &ConsumerBaseType, &PoolType, &PoolLeaseType,
        &PoolWriteType, &ChannelType, &ChannelMemoryType, &ClosedByBlockType, &DeclaredSchemaType,
        &PackPlanType,
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (PyModule_AddType(module, types[i]) < 0) {
            return false;
        }
    }
    return true;
}

struct py_words py_word;

static bool intern_words(void) {
#define TEXT(word) #word,
    static const char *const texts[] = {PY_WORDS(TEXT)};
    PyObject **at = (PyObject **)&py_word;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        at[i] = PyUnicode_InternFromString(texts[i]);
        if (at[i] == NULL) {
            return false;
        }
    }
    return true;
}

static bool add_functions(PyObject *module) {
    PyMethodDef *const tables[] = {
        py_arrays_functions,           py_channel_messages_functions,
        py_client_lease_functions,     py_delivery_functions,
        py_end_lease_functions,        py_export_functions,
        py_import_functions,           py_inspect_functions,
        py_origin_head_functions,      py_pool_patch_functions,
        py_pool_rows_functions,        py_relay_functions,
        py_request_functions,          py_retry_functions,
        py_scores_functions,           py_splits_functions,
    };
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
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
    if (!prepared && (!py_segment_init_fork() || !py_companion_init_fork() || !intern_words())) {
        return -1;
    }
    prepared = true;
    return add_types(module) && py_add_constants(module) && add_functions(module) ? 0 : -1;
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
