/* ClientLease: one group leased by a daemon to this process. Places and identities name
 * trajectories between the two processes without Python work per trajectory.
 *
 * Invariant: a lease's refs lie within its borrower's segment; their contents remain unchecked
 * here. */
#include "python/group/group.h"

/* Parse one place; false if it lies outside the segment. */
static bool parse_place(const struct segment *segment, const char *bytes, struct record_ref *ref) {
    struct wire_place place;
    memcpy(&place, bytes, sizeof place);
    *ref = (struct record_ref){{place.extent, place.generation, place.offset}, place.bytes};
    return place.extent < segment->extent_count && place.offset % SHMBUS_RECORD_ALIGN == 0 &&
           place.bytes >= sizeof(struct record_header) && place.bytes <= segment->record_limit &&
           place.offset <= segment->record_limit - place.bytes &&
           place.offset + place.bytes <=
               (segment->extent_count - place.extent) * segment->extent_bytes;
}

static ClientLeaseObject *lease_of_places(HolderObject *borrower, const char *bytes,
                                          Py_ssize_t size) {
    Py_ssize_t each = (Py_ssize_t)sizeof(struct wire_place), count = size / each;
    if (count == 0 || size % each != 0 || count > (Py_ssize_t)SHMBUS_MAX_GROUP_SIZE) {
        return NULL;
    }
    ClientLeaseObject *self = PyObject_NewVar(ClientLeaseObject, &ClientLeaseType, count);
    if (self == NULL) {
        return NULL;
    }
    self->borrower = (HolderObject *)Py_NewRef((PyObject *)borrower);
    self->key = self->samples = NULL;
    self->number = 0;
    self->step = -1;
    self->size = 0;
    self->reason = LEASE_HELD;
    self->lost = self->locked = false;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!parse_place(&borrower->segment->c, bytes + i * each, &self->refs[i])) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return self;
}

ClientLeaseObject *py_client_lease_new(HolderObject *borrower, PyObject *granted, long long step) {
    PyObject *number = PyObject_GetAttr(granted, py_word.number);
    PyObject *size = number == NULL ? NULL : PyObject_GetAttr(granted, py_word.size);
    PyObject *places = size == NULL ? NULL : PyObject_GetAttr(granted, py_word.places);
    char *bytes;
    Py_ssize_t count;
    ClientLeaseObject *self =
        places == NULL || PyBytes_AsStringAndSize(places, &bytes, &count) < 0
            ? NULL
            : lease_of_places(borrower, bytes, count);
    if (self != NULL) {
        self->step = step;
        self->number = PyLong_AsLongLong(number);
        self->size = (unsigned int)PyLong_AsUnsignedLong(size);
        if (PyErr_Occurred()) {
            Py_CLEAR(self);
        }
    }
    Py_XDECREF(number);
    Py_XDECREF(size);
    Py_XDECREF(places);
    return self;
}

static void py_client_lease_dealloc(ClientLeaseObject *self) {
    Py_XDECREF(self->key);
    Py_XDECREF(self->samples);
    Py_DECREF(self->borrower);
    PyObject_Free(self);
}

static PyMemberDef client_lease_members[] = {
    {"key", T_OBJECT_EX, offsetof(ClientLeaseObject, key), READONLY, NULL},
    {"samples", T_OBJECT_EX, offsetof(ClientLeaseObject, samples), READONLY, NULL},
    {"number", T_LONGLONG, offsetof(ClientLeaseObject, number), 0, NULL},
    {"step", T_LONGLONG, offsetof(ClientLeaseObject, step), READONLY, NULL},
    {"size", T_UINT, offsetof(ClientLeaseObject, size), READONLY, NULL},
    {"reason", T_INT, offsetof(ClientLeaseObject, reason), READONLY, NULL},
    {"lost", T_BOOL, offsetof(ClientLeaseObject, lost), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ClientLeaseType = {
    TYPE_BASICS("ClientLease", ClientLeaseObject, py_client_lease_dealloc, 0),
    .tp_itemsize = sizeof(struct record_ref),
    .tp_members = client_lease_members,
};

static PyObject *pack_each(PyObject *items, size_t each,
                           void (*pack)(const TrajectoryObject *t, char *to)) {
    NEVER(!PyList_Check(items), NULL);
    Py_ssize_t count = PyList_GET_SIZE(items);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)each);
    for (Py_ssize_t i = 0; packed != NULL && i < count; i++) {
        const TrajectoryObject *t = py_as_trajectory(PyList_GET_ITEM(items, i));
        if (t == NULL) {
            Py_CLEAR(packed);
        } else {
            pack(t, PyBytes_AS_STRING(packed) + (size_t)i * each);
        }
    }
    return packed;
}

static void pack_place(const TrajectoryObject *t, char *to) {
    struct wire_place place = {t->ref.place.extent, t->ref.place.generation, t->ref.place.offset,
                               t->ref.bytes};
    memcpy(to, &place, sizeof place);
}

static void pack_identity(const TrajectoryObject *t, char *to) {
    uint64_t identity[2] = {t->producer_id, t->sequence};
    memcpy(to, identity, sizeof identity);
}

/* places(trajectories) -> bytes, PLACE_BYTES per trajectory. */
static PyObject *py_places(PyObject *Py_UNUSED(module), PyObject *items) {
    return pack_each(items, sizeof(struct wire_place), pack_place);
}

/* identities(trajectories) -> bytes: producer_id and sequence, two native u64 per trajectory. */
static PyObject *py_identities(PyObject *Py_UNUSED(module), PyObject *items) {
    return pack_each(items, 2 * sizeof(uint64_t), pack_identity);
}

PyMethodDef py_client_lease_functions[] = {
    {"places", py_places, METH_O, NULL},
    {"identities", py_identities, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
