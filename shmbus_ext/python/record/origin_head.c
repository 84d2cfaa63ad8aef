/* OriginHead: a head of a record on an arbitrary bus, and heads as bytes, for a relay's
 * announcements.
 *
 * Invariants:
 *  - An unpacked head holds only values acceptable to a group table: other bytes are refused as a
 *    whole.
 *  - A head refers to text and numbers only and takes part in no reference cycle. */
#include "python/record/record.h"

#include "ring/block.h"

/* A head as bytes, followed by id and reason in UTF-8. Numbers are in native byte order: both ends
 * share one layout version, which determines the order.
 *
 * Offset  Size  Field
 *      0    32  origin
 *     32     8  round           SHMBUS_NO_ROUND without a round
 *     40     8  policy_version
 *     48     8  made_ns
 *     56     8  nbytes
 *     64     8  score
 *     72     4  check
 *     76     2  group_size      0 for a failure without a known size
 *     78     2  need
 *     80     2  index
 *     82     1  id_bytes
 *     83     1  split           number on the origin's bus
 *     84     4  reason_bytes    NO_REASON for a sample */
struct head_row {
    uint8_t origin[RELAY_ORIGIN_BYTES];
    int64_t round;
    int64_t policy_version;
    int64_t made_ns;
    uint64_t nbytes;
    double score;
    uint32_t check;
    uint16_t group_size, need, index;
    uint8_t id_bytes, split;
    uint32_t reason_bytes;
};
_Static_assert(sizeof(struct head_row) == 88, "layout");
_Static_assert(offsetof(struct head_row, reason_bytes) == 84, "layout");
_Static_assert(SHMBUS_MAX_ID_BYTES <= UINT8_MAX, "a byte says how long an id is");
#define NO_REASON UINT32_MAX

/* ---- A single head ---- */

/* Steal the references of origin, id and reason, which may be NULL with an exception. */
static PyObject *make_head(const struct head_row *row, PyObject *origin, PyObject *instance_id,
                           PyObject *reason) {
    OriginHeadObject *self = origin != NULL && instance_id != NULL && reason != NULL
                                 ? PyObject_New(OriginHeadObject, &OriginHeadType)
                                 : NULL;
    if (self == NULL) {
        Py_XDECREF(origin);
        Py_XDECREF(instance_id);
        Py_XDECREF(reason);
        return NULL;
    }
    self->origin = origin;
    self->instance_id = instance_id;
    self->reason = reason;
    self->round = row->round;
    self->policy_version = row->policy_version;
    self->made_ns = row->made_ns;
    self->clock_ns = 0;
    self->nbytes = row->nbytes;
    self->score = row->score;
    self->check = row->check;
    self->group_size = row->group_size;
    self->need = row->need;
    self->index = row->index;
    self->split = row->split;
    self->key = py_make_key(instance_id, row->round, row->split);
    if (self->key == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void py_origin_head_dealloc(OriginHeadObject *self) {
    Py_XDECREF(self->origin);
    Py_XDECREF(self->instance_id);
    Py_XDECREF(self->key);
    Py_XDECREF(self->reason);
    PyObject_Free(self);
}

/* True if acceptable to a group table. */
static bool row_holds(const struct head_row *row) {
    const bool failed = row->reason_bytes != NO_REASON;
    return row->group_size <= SHMBUS_MAX_GROUP_SIZE && row->need <= row->group_size &&
           row->index < SHMBUS_MAX_GROUP_SIZE && row->id_bytes >= 1 &&
           row->split < SHMBUS_MAX_SPLITS && row->nbytes <= INT64_MAX &&
           row->policy_version >= 0 &&
           (row->group_size == 0 ? failed : row->index < row->group_size && row->need >= 1);
}

static PyObject *py_origin_head_round(OriginHeadObject *self, void *Py_UNUSED(ignored)) {
    return py_round(self->round);
}

static PyObject *py_origin_head_failed(OriginHeadObject *self, void *Py_UNUSED(ignored)) {
    return PyBool_FromLong(self->reason != Py_None);
}

static PyObject *py_origin_head_committed_ns(OriginHeadObject *self, void *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(self->made_ns - self->clock_ns);
}

static PyObject *py_origin_head_repr(OriginHeadObject *self) {
    return PyUnicode_FromFormat("OriginHead(%R, %R, index=%d, reason=%R)", self->origin, self->key,
                                (int)self->index, self->reason);
}

/* ---- Heads as bytes ---- */

struct sink {
    PyObject *bytes;
    Py_ssize_t used;
};

/* Append room for `more` bytes; NULL with an exception. */
static char *extend(struct sink *to, size_t more) {
    Py_ssize_t size = PyBytes_GET_SIZE(to->bytes), wanted = to->used + (Py_ssize_t)more;
    if (wanted > size && _PyBytes_Resize(&to->bytes, wanted + size) < 0) {
        return NULL;
    }
    char *at = PyBytes_AS_STRING(to->bytes) + to->used;
    to->used = wanted;
    return at;
}

static bool append(struct sink *to, struct head_row *row, PyObject *id, PyObject *reason) {
    Py_ssize_t id_bytes, reason_bytes = 0;
    const char *id_text = PyUnicode_AsUTF8AndSize(id, &id_bytes), *reason_text = NULL;
    if (reason != Py_None) {
        reason_text = PyUnicode_AsUTF8AndSize(reason, &reason_bytes);
    }
    if (id_text == NULL || (reason != Py_None && reason_text == NULL)) {
        return false;
    }
    row->id_bytes = (uint8_t)id_bytes;
    row->reason_bytes = reason == Py_None ? NO_REASON : (uint32_t)reason_bytes;
    char *at = extend(to, sizeof *row + (size_t)(id_bytes + reason_bytes));
    if (at == NULL) {
        return false;
    }
    memcpy(at, row, sizeof *row);
    memcpy(at + sizeof *row, id_text, (size_t)id_bytes);
    if (reason_bytes > 0) {
        memcpy(at + sizeof *row + id_bytes, reason_text, (size_t)reason_bytes);
    }
    return true;
}

static bool append_record(struct sink *to, PyObject *item, PyObject *reason_of) {
    const TrajectoryObject *t = py_as_trajectory(item);
    if (t == NULL) {
        return false;
    }
    struct head_row row = {
        .round = t->round,
        .policy_version = t->policy_version,
        .made_ns = (int64_t)t->committed_ns,
        .nbytes = t->ref.bytes,
        .score = t->score,
        .group_size = (uint16_t)PyLong_AsUnsignedLong(t->group_size),
        .need = t->need,
        .index = (uint16_t)PyLong_AsUnsignedLong(t->index),
        .split = (uint8_t)t->split,
    };
    if (!py_trajectory_readable(t)) {
        return false;
    }
    if (!block_head_check(py_trajectory_bytes(t), t->ref.bytes, &row.check)) {
        py_trajectory_raise_changed(t);
        return false;
    }
    if (row.group_size == 0) {
        row.need = 0;
    }
    origin_pack(row.origin, t->holder->segment->c.header->identity, t->producer_id, t->sequence);
    PyObject *reason = t->failed ? PyObject_CallOneArg(reason_of, item) : Py_NewRef(Py_None);
    bool good = reason != NULL;
    if (good && reason != Py_None && !PyUnicode_Check(reason)) {
        PyErr_SetString(PyExc_TypeError, "expected a reason as text");
        good = false;
    }
    good = good && append(to, &row, t->instance_id, reason);
    Py_XDECREF(reason);
    return good;
}

/* Size of a typical head with its id. */
#define USUAL_BYTES (sizeof(struct head_row) + 24)

/* read_heads(trajectories, reason_of) -> bytes: the heads of records in the ring, for unpack_heads
 * on a different node; for a failure report, reason_of(trajectory) returns the reason. */
static PyObject *py_read_heads(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *records, *reason_of;
    if (!PyArg_ParseTuple(args, "OO", &records, &reason_of)) {
        return NULL;
    }
    PyObject *list = PySequence_Fast(records, "expected records");
    if (list == NULL) {
        return NULL;
    }
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(list);
    struct sink to = {PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)USUAL_BYTES), 0};
    bool good = to.bytes != NULL;
    for (Py_ssize_t i = 0; good && i < n; i++) {
        good = append_record(&to, PySequence_Fast_GET_ITEM(list, i), reason_of);
    }
    Py_DECREF(list);
    if (good) {
        (void)_PyBytes_Resize(&to.bytes, to.used);
    } else {
        Py_CLEAR(to.bytes);
    }
    return to.bytes;
}

/* Add the head at `at` if its split maps to a number here; on error clear the list, with an
 * exception. */
static void unpack_one(PyObject **heads, const char **at, const char *end,
                       const Py_buffer *splits) {
    struct head_row row;
    size_t left = (size_t)(end - *at);
    if (left >= sizeof row) {
        memcpy(&row, *at, sizeof row);
        left -= sizeof row;
        const uint64_t reason_bytes = row.reason_bytes == NO_REASON ? 0 : row.reason_bytes;
        if (row_holds(&row) && row.id_bytes + reason_bytes <= left) {
            const char *id = *at + sizeof row, *reason = id + row.id_bytes;
            *at = reason + reason_bytes;
            row.split = row.split < splits->len ? ((const uint8_t *)splits->buf)[row.split]
                                                 : SHMBUS_MAX_SPLITS;
            if (row.split >= SHMBUS_MAX_SPLITS) {
                return;
            }
            PyObject *origin = PyBytes_FromStringAndSize((char *)row.origin, sizeof row.origin);
            PyObject *text = origin == NULL ? NULL : PyUnicode_DecodeUTF8(id, row.id_bytes, NULL);
            PyObject *why = NULL;
            if (text != NULL) {
                why = row.reason_bytes == NO_REASON
                          ? Py_NewRef(Py_None)
                          : PyUnicode_DecodeUTF8(reason, (Py_ssize_t)reason_bytes, NULL);
            }
            py_list_add(heads, make_head(&row, origin, text, why));
            return;
        }
    }
    PyErr_SetString(PyExc_ValueError,
                    "heads: expected them one behind the other, got bytes that say what no record "
                    "can; run the same shmbus on both nodes");
    Py_CLEAR(*heads);
}

/* unpack_heads(bytes, splits=b"\0") -> list[OriginHead]: the heads whose split maps to a number
 * here; `splits` holds a byte per split number there. ValueError for malformed bytes. */
static PyObject *py_unpack_heads(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer packed, splits = {.buf = "", .len = 1};
    if (!PyArg_ParseTuple(args, "y*|y*", &packed, &splits)) {
        return NULL;
    }
    PyObject *heads = PyList_New(0);
    const char *at = packed.buf, *end = at + packed.len;
    while (heads != NULL && at < end) {
        unpack_one(&heads, &at, end, &splits);
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&splits);
    return heads;
}

static PyMemberDef members[] = {
    {"origin", T_OBJECT_EX, offsetof(OriginHeadObject, origin), READONLY, NULL},
    {"instance_id", T_OBJECT_EX, offsetof(OriginHeadObject, instance_id), READONLY, NULL},
    {"key", T_OBJECT_EX, offsetof(OriginHeadObject, key), READONLY, NULL},
    {"reason", T_OBJECT_EX, offsetof(OriginHeadObject, reason), READONLY, NULL},
    {"meta", T_OBJECT_EX, offsetof(OriginHeadObject, reason), READONLY, NULL},
    {"group_size", T_USHORT, offsetof(OriginHeadObject, group_size), READONLY, NULL},
    {"need", T_USHORT, offsetof(OriginHeadObject, need), READONLY, NULL},
    {"index", T_USHORT, offsetof(OriginHeadObject, index), READONLY, NULL},
    {"split", T_USHORT, offsetof(OriginHeadObject, split), READONLY, NULL},
    {"score", T_DOUBLE, offsetof(OriginHeadObject, score), READONLY, NULL},
    {"policy_version", T_LONGLONG, offsetof(OriginHeadObject, policy_version), READONLY, NULL},
    {"nbytes", T_ULONGLONG, offsetof(OriginHeadObject, nbytes), READONLY, NULL},
    {"check", T_UINT, offsetof(OriginHeadObject, check), READONLY, NULL},
    {"made_ns", T_LONGLONG, offsetof(OriginHeadObject, made_ns), READONLY, NULL},
    {"clock_ns", T_LONGLONG, offsetof(OriginHeadObject, clock_ns), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"round", (getter)py_origin_head_round, NULL, NULL, NULL},
    {"failed", (getter)py_origin_head_failed, NULL, NULL, NULL},
    {"committed_ns", (getter)py_origin_head_committed_ns, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject OriginHeadType = {
    TYPE_BASICS("OriginHead", OriginHeadObject, py_origin_head_dealloc, 0),
    .tp_doc = "A head of a record on any bus, as a group table takes it.",
    .tp_members = members,
    .tp_getset = getset,
    .tp_repr = (reprfunc)py_origin_head_repr,
};

PyMethodDef py_origin_head_functions[] = {
    {"read_heads", py_read_heads, METH_VARARGS, NULL},
    {"unpack_heads", py_unpack_heads, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
