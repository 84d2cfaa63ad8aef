/* Numbers and texts of the core, exported to Python. */
#include "python/batch/batch.h"
#include "python/channel/channel.h"
#include "python/group/group.h"
#include "python/pool/pool.h"
#include "python/put/put.h"
#include "ring/block.h"
#include "ring/relay_journal.h"

static const struct {
    const char *name;
    long value;
} numbers[] = {
    /* Records, fields and groups. */
    {"LAYOUT_VERSION", SHMBUS_LAYOUT_VERSION},
    {"LAYOUT_HASH", (long)SHMBUS_LAYOUT_HASH},
    {"NO_ROUND", (long)SHMBUS_NO_ROUND},
    {"PAGE", SHMBUS_PAGE},
    {"RECORD_ALIGN", SHMBUS_RECORD_ALIGN},
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
    /* A segment seen from outside. */
    {"MAGIC", (long)SHMBUS_MAGIC},
    {"HEADER_BYTES", (long)SHMBUS_HEADER_BYTES},
    {"RELEASED_OFFSET", (long)offsetof(struct bus_header, released)},
    {"REASONS", SHMBUS_REASONS},
    {"LOCK_COLLECTOR", SHMBUS_LOCK_COLLECTOR},
    {"LOCK_SLOT", SHMBUS_LOCK_SLOT},
    {"REF_OFFSET_BITS", (long)REF_OFFSET_BITS},
    {"FLAG_MOVED", SHMBUS_FLAG_MOVED},
    {"FLAG_FAILED", SHMBUS_FLAG_FAILED},
    {"FLAG_NO_SIZE", SHMBUS_FLAG_NO_SIZE},
    {"FLAGS_KEPT", SHMBUS_FLAGS_KEPT},
    {"RETRY_PAUSE", SHMBUS_RETRY_PAUSE},
    /* Splits. */
    {"MAX_SPLITS", SHMBUS_MAX_SPLITS},
    {"SPLIT_TRAIN", SHMBUS_SPLIT_TRAIN},
    {"SPLIT_LABEL_BYTES", SHMBUS_SPLIT_LABEL_BYTES},
    /* The request lane. */
    {"REQUEST_LEVELS", SHMBUS_REQUEST_LEVELS},
    {"REQUEST_MAX_ROWS", SHMBUS_REQUEST_MAX_ROWS},
    {"REQUEST_ROW_SHARE", SHMBUS_REQUEST_ROW_SHARE},
    {"REQUEST_UNIT", SHMBUS_REQUEST_UNIT},
    {"REQUEST_MIN_BYTES", (long)SHMBUS_REQUEST_MIN_BYTES},
    {"REQUEST_MAX_BYTES", (long)SHMBUS_REQUEST_MAX_BYTES},
    {"LEAD_ROWS", SHMBUS_LEAD_ROWS},
    {"REQUEST_IS_RETRY", (long)REQUEST_IS_RETRY},
    /* Retry requests. */
    {"RETRY_ENTRIES", SHMBUS_RETRY_ENTRIES},
    {"RETRY_REASON_BYTES", SHMBUS_RETRY_REASON_BYTES},
    {"UNMADE_REASON_BYTES", SHMBUS_UNMADE_WORDS * sizeof(uint64_t)},
    /* Relays. */
    {"RELAY_SETTLED", RELAY_SETTLED},
    {"BLOCK_HEADER_BYTES", sizeof(struct block_header)},
    /* Refusals of a sample. */
    {"REFUSED_DUPLICATE", REFUSED_DUPLICATE}, {"REFUSED_GROUP_SIZE", REFUSED_GROUP_SIZE},
    {"REFUSED_SURPLUS", REFUSED_SURPLUS},     {"REFUSED_FAILING", REFUSED_FAILING},
    {"REFUSED_LEASED", REFUSED_LEASED},
    /* Delivery figures. */
    {"FIGURE_WORDS", (long)(sizeof(struct figure_entry) / 8)},
    /* Batches. */
    {"EXTRA_TOKEN", EXTRA_TOKEN},
    {"EXTRA_RAGGED", EXTRA_RAGGED},
    {"EXTRA_SEQUENCE", EXTRA_SEQUENCE},
    {"COPY_WORDS", COPY_WORDS},
    {"CHUNK_WORDS", CHUNK_WORDS},
    {"MOST_THREADS", THREADS_MOST},
    {"HAS_LOGPROBS", 1 << FIELD_LOGPROBS},
    {"SAMPLE_MASKED", SAMPLE_MASKED},
    {"SAMPLE_ZEROED", SAMPLE_ZEROED},
    /* Results of opening a file, or of claiming a place. */
    {"SHARED_NO_SPACE", SHARED_NO_SPACE},         {"SHARED_UNFINISHED", SHARED_UNFINISHED},
    {"SHARED_BAD_MAGIC", SHARED_BAD_MAGIC},       {"SHARED_BAD_VERSION", SHARED_BAD_VERSION},
    {"SHARED_BAD_GEOMETRY", SHARED_BAD_GEOMETRY}, {"SHARED_TRUNCATED", SHARED_TRUNCATED},
    {"SHARED_NOTHING", SHARED_NOTHING},           {"SHARED_HELD", SHARED_HELD},
    {"SHARED_DAMAGED", SHARED_DAMAGED},
    /* Pools. */
    {"POOL_LAYOUT_VERSION", POOL_LAYOUT_VERSION},
    {"POOL_MAX_SLOTS", POOL_MAX_SLOTS},
    {"POOL_MAX_RANKS", POOL_MAX_RANKS},
    {"POOL_MAX_READERS", POOL_MAX_READERS},
    {"POOL_LABEL_BYTES", POOL_LABEL_BYTES - 1}, /* less the terminating byte */
    {"POOL_DEVICE_BYTES", POOL_DEVICE_BYTES - 1},
    {"POOL_TEXT_BYTES", POOL_TEXT_BYTES - 1},
    {"POOL_ERROR_BYTES", POOL_ERROR_BYTES - 1},
    {"POOL_BELL_VERSION", POOL_BELL_VERSION},
    {"POOL_BELL_SPACE", POOL_BELL_SPACE},
    {"POOL_BELL_RANKS", POOL_BELL_RANKS},
    {"PIECE_ABSENT", PIECE_ABSENT},
    {"PIECE_DONE", PIECE_DONE},
    {"PIECE_FAILED", PIECE_FAILED},
    {"PIECE_DEAD", PIECE_DEAD},
    {"ROW_ALIVE", ROW_ALIVE},
    {"ROW_DEAD", ROW_DEAD},
    /* Channels. */
    {"CHANNEL_LAYOUT_VERSION", CHANNEL_LAYOUT_VERSION},
    {"CHANNEL_META_ALIGN", CHANNEL_META_ALIGN},
    {"CHANNEL_REASON_BYTES", CHANNEL_REASON_BYTES - 1}, /* less the terminating byte */
    {"CHANNEL_LABEL_BYTES", CHANNEL_LABEL_BYTES - 1},   /* likewise */
    {"CHANNEL_SENDER", CHANNEL_SENDER},
    {"DEVIATION_OF_NONE", DEVIATION_OF_NONE},
    {"DEVIATION_OF_GROUP", DEVIATION_OF_GROUP},
    {"DEVIATION_OF_ALL", DEVIATION_OF_ALL},
    {"CHANNEL_RECEIVER", CHANNEL_RECEIVER},
    {"CHANNEL_STEP", CHANNEL_STEP},
    {"CHANNEL_SKIP", CHANNEL_SKIP},
    {"CHANNEL_FAIL", CHANNEL_FAIL},
    {"CHANNEL_ABSENT", CHANNEL_ABSENT},
    {"CHANNEL_ALIVE", CHANNEL_ALIVE},
    {"CHANNEL_DEAD", CHANNEL_DEAD},
    {"CHANNEL_LEFT", CHANNEL_LEFT},
};

_Static_assert(ELEMENT_BOOL == 0 && ELEMENT_U64 == 8 && ELEMENT_F32 == 9 && ELEMENT_F64 == 10,
               "ELEMENT_KINDS has numpy's name of each, in this order");
_Static_assert(SHMBUS_WAITS == 4, "WAITS has a name for each");

static bool add_objects(PyObject *module) {
    return py_add_object(module, "MAX_SCORE", PyFloat_FromDouble(MAX_SCORE)) &&
           py_add_object(module, "SCORE_RESOLUTION", PyFloat_FromDouble(SCORE_RESOLUTION)) &&
           py_add_object(module, "MAX_LOGPROB", PyFloat_FromDouble((double)MAX_LOGPROB)) &&
           py_add_object(module, "ROW_LENGTHS", PyUnicode_FromString(SHMBUS_ROW_LENGTHS)) &&
           py_add_object(module, "SHARED_PREFIX", PyUnicode_FromString(SHMBUS_SHARED_PREFIX)) &&
           py_add_object(module, "TRAIN", PyUnicode_FromString(SHMBUS_SPLIT_TRAIN_LABEL)) &&
           py_add_object(module, "RETRY_BUSY", PyLong_FromUnsignedLongLong(SHMBUS_RETRY_BUSY)) &&
           py_add_object(module, "RETRY_ANSWERED",
                         PyLong_FromUnsignedLongLong(SHMBUS_RETRY_ANSWERED)) &&
           py_add_object(module, "WAITS",
                         Py_BuildValue("(ssss)", "space", "paused", "ahead", "groups")) &&
           py_add_object(module, "ELEMENT_KINDS",
                         Py_BuildValue("(sssssssssss)", "?", "i1", "u1", "i2", "u2", "i4", "u4",
                                       "i8", "u8", "f4", "f8")) &&
           py_add_object(module, "FIGURE_BOUNDS", py_figure_bounds()) &&
           py_add_object(module, "STANDARD_DTYPES", py_standard_dtypes());
}

bool py_add_constants(PyObject *module) {
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value) < 0) {
            return false;
        }
    }
    return add_objects(module);
}
