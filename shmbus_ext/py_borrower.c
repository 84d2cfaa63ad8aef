/* Borrower: makes the trajectories of groups that a daemon leased to this process.
 *
 * Invariants:
 *  - The segment is mapped read-only; nothing that a message or the segment says is used before it
 *    is bounded and its frame's checksum, which is salted with its place, has been found right.
 *  - Each extent of a lease has this client's lease lock until the lease has ended for good, and
 *    each extent that an array looks into has a view lock. The kernel drops both when the process
 *    dies, and a daemon that dies does not take them with it: they are what the next one believes.
 *  - A view lock is taken while its record is leased, and found by the reader before it frees. */
#include "pyapi.h"

typedef struct {
    HOLDER_HEAD
    uint32_t client;
    uint32_t *leases; /* groups' records, by extent */
    uint32_t *views;  /* pins and copies under way, by extent */
    struct record_copy copy;
} BorrowerObject;

static int64_t lease_byte(uint32_t client, uint32_t extent) {
    return SHMBUS_LOCK_LEASE + (int64_t)client * SHMBUS_MAX_EXTENTS + extent;
}

static bool lock_counted(BorrowerObject *self, uint32_t *count, int64_t byte) {
    if (*count == 0 && segment_lock_shared(self->segment->c.fd, byte) != LOCK_TAKEN) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->segment->name);
        return false;
    }
    ++*count;
    return true;
}

static void unlock_counted(BorrowerObject *self, uint32_t *count, int64_t byte) {
    if (--*count == 0 && self->segment->c.fd >= 0) {
        segment_unlock(self->segment->c.fd, byte);
    }
}

static bool hold_view(HolderObject *holder, const struct record_ref *ref) {
    BorrowerObject *self = (BorrowerObject *)holder;
    uint32_t extent = ref->place.extent;
    return lock_counted(self, &self->views[extent], SHMBUS_LOCK_VIEW + extent);
}

static void let_go_of_view(HolderObject *holder, const struct record_ref *ref) {
    BorrowerObject *self = (BorrowerObject *)holder;
    uint32_t extent = ref->place.extent;
    unlock_counted(self, &self->views[extent], SHMBUS_LOCK_VIEW + extent);
}

static const struct holder_kind borrower_kind = {false, hold_view, let_go_of_view};

static bool borrower_usable(BorrowerObject *self) {
    if (!self->attached) {
        PyErr_SetString(hooks.closed_error, "this Consumer is closed; make a new one");
        return false;
    }
    return segment_usable(self->segment, "Consumer");
}

static int borrower_init(BorrowerObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"segment", NULL};
    SegmentObject *segment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &SegmentType, &segment)) {
        return -1;
    }
    if (self->segment != NULL) {
        PyErr_SetString(PyExc_TypeError, "this borrower is initialised already");
        return -1;
    }
    if (!holder_init((HolderObject *)self, segment, &borrower_kind) ||
        !segment_usable(segment, "handle")) {
        return -1;
    }
    self->leases = PyMem_Calloc(segment->c.extent_count, sizeof *self->leases);
    self->views = PyMem_Calloc(segment->c.extent_count, sizeof *self->views);
    if (self->leases == NULL || self->views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->attached = true;
    return 0;
}

/* set_client(number): the leases' locks are under this number from now on. */
static PyObject *borrower_set_client(BorrowerObject *self, PyObject *argument) {
    unsigned long client = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !borrower_usable(self)) {
        return NULL;
    }
    if (client >= SHMBUS_MAX_CLIENTS) {
        PyErr_Format(PyExc_ValueError, "client: expected 0 to %u, got %lu", SHMBUS_MAX_CLIENTS - 1,
                     client);
        return NULL;
    }
    uint32_t before = self->client;
    for (uint32_t i = 0; client != before && i < self->segment->c.extent_count; i++) {
        if (self->leases[i] > 0) {
            if (segment_lock_shared(self->segment->c.fd, lease_byte((uint32_t)client, i)) !=
                LOCK_TAKEN) {
                return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->segment->name);
            }
            segment_unlock(self->segment->c.fd, lease_byte(before, i));
        }
    }
    self->client = (uint32_t)client;
    Py_RETURN_NONE;
}

/* The places of a message, bounded; NULL with a ValueError. */
static struct record_ref *parse_places(BorrowerObject *self, const char *bytes, Py_ssize_t size,
                                       Py_ssize_t *count) {
    const struct segment *segment = &self->segment->c;
    *count = size / (Py_ssize_t)sizeof(struct wire_place);
    struct record_ref *refs = PyMem_Malloc((size_t)(*count + 1) * sizeof *refs);
    if (refs == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    bool good = size % (Py_ssize_t)sizeof(struct wire_place) == 0 &&
                *count <= (Py_ssize_t)SHMBUS_MAX_GROUP_SIZE;
    for (Py_ssize_t i = 0; good && i < *count; i++) {
        struct wire_place place;
        memcpy(&place, bytes + i * (Py_ssize_t)sizeof place, sizeof place);
        good = place.extent < segment->extent_count && place.offset % SHMBUS_RECORD_ALIGN == 0 &&
               place.bytes >= sizeof(struct record_header) && place.bytes <= segment->record_limit &&
               place.offset <= segment->record_limit - place.bytes &&
               place.offset + place.bytes <=
                   (segment->extent_count - place.extent) * segment->extent_bytes;
        refs[i] = (struct record_ref){{place.extent, place.generation, place.offset}, place.bytes};
    }
    if (!good) {
        PyErr_Format(PyExc_ValueError,
                     "bus '%U': %zd bytes of places that do not lie in this segment",
                     self->segment->name, size);
        PyMem_Free(refs);
        return NULL;
    }
    return refs;
}

static void end_leases(BorrowerObject *self, const struct record_ref *refs, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t extent = refs[i].place.extent;
        if (self->leases[extent] > 0) {
            unlock_counted(self, &self->leases[extent], lease_byte(self->client, extent));
        }
    }
}

static TrajectoryObject *borrow_one(BorrowerObject *self, const struct record_ref *ref) {
    const struct record_header *shared =
        (const void *)(segment_extent(&self->segment->c, ref->place.extent) + ref->place.offset);
    struct record_copy *copy = &self->copy;
    if (record_read_frame(shared, ref->bytes, &ref->place, &copy->header) != RECORD_OK ||
        copy->header.record_bytes != ref->bytes ||
        atomic_load_explicit(&copy->header.state, memory_order_relaxed) != SHMBUS_COMMITTED ||
        record_read_body(shared, copy) != RECORD_OK) {
        PyErr_Format(PyExc_ValueError,
                     "bus '%U': no committed record at extent %u, offset %llu, which was leased",
                     self->segment->name, ref->place.extent,
                     (unsigned long long)ref->place.offset);
        return NULL;
    }
    return trajectory_new((HolderObject *)self, copy, ref);
}

/* borrow(places) -> list[Trajectory]; ValueError where a place holds no committed record. */
static PyObject *borrower_borrow(BorrowerObject *self, PyObject *argument) {
    char *bytes;
    Py_ssize_t size, count, locked = 0;
    if (PyBytes_AsStringAndSize(argument, &bytes, &size) < 0 || !borrower_usable(self)) {
        return NULL;
    }
    struct record_ref *refs = parse_places(self, bytes, size, &count);
    if (refs == NULL) {
        return NULL;
    }
    PyObject *found = PyList_New(count);
    /* The locks first: what is read behind them cannot be delivered to another any more. */
    for (; found != NULL && locked < count; locked++) {
        uint32_t extent = refs[locked].place.extent;
        if (!lock_counted(self, &self->leases[extent], lease_byte(self->client, extent))) {
            Py_CLEAR(found);
            break;
        }
    }
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        PyObject *t = (PyObject *)borrow_one(self, &refs[i]);
        if (t == NULL) {
            Py_CLEAR(found);
        } else {
            PyList_SET_ITEM(found, i, t);
        }
    }
    if (found == NULL) {
        end_leases(self, refs, locked);
    }
    PyMem_Free(refs);
    return found;
}

/* release(trajectories): they cannot be read any more; arrays made of them before stay valid. */
static PyObject *borrower_release(BorrowerObject *self, PyObject *items) {
    if (!PyList_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "release: expected a list of trajectories");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        TrajectoryObject *t = (TrajectoryObject *)PyList_GET_ITEM(items, i);
        if (!Py_IS_TYPE(t, &TrajectoryType) || t->reader != (HolderObject *)self) {
            PyErr_Format(PyExc_TypeError, "release: expected trajectories of this Consumer, got %s",
                         Py_TYPE(t)->tp_name);
            return NULL;
        }
        t->released = true;
        Py_CLEAR(t->pin);
    }
    Py_RETURN_NONE;
}

/* end_lease(places): the daemon has confirmed the end, or the lease is lost. */
static PyObject *borrower_end_lease(BorrowerObject *self, PyObject *argument) {
    char *bytes;
    Py_ssize_t size, count;
    if (PyBytes_AsStringAndSize(argument, &bytes, &size) < 0) {
        return NULL;
    }
    if (self->attached && self->segment->generation == fork_generation) {
        struct record_ref *refs = parse_places(self, bytes, size, &count);
        if (refs == NULL) {
            return NULL;
        }
        end_leases(self, refs, count);
        PyMem_Free(refs);
    }
    Py_RETURN_NONE;
}

/* (extents under a lease's lock, extents under a view's lock), for tests and messages. */
static PyObject *borrower_locks(BorrowerObject *self, PyObject *ignored) {
    (void)ignored;
    unsigned int leases = 0, views = 0;
    for (uint32_t i = 0; self->attached && i < self->segment->c.extent_count; i++) {
        leases += self->leases[i] > 0;
        views += self->views[i] > 0;
    }
    return Py_BuildValue("(II)", leases, views);
}

static void borrower_end(BorrowerObject *self) {
    if (self->attached) {
        self->attached = false;
        /* Views get copies of their own; with the description, all locks go. */
        segment_release_handle(self->segment);
        for (PinObject *p = self->segment->pins; p != NULL; p = p->next) {
            p->reader = NULL;
        }
    }
}

static PyObject *borrower_close(BorrowerObject *self, PyObject *ignored) {
    (void)ignored;
    borrower_end(self);
    Py_RETURN_NONE;
}

static void borrower_dealloc(BorrowerObject *self) {
    if (self->segment != NULL) {
        borrower_end(self);
    }
    PyMem_Free(self->leases);
    PyMem_Free(self->views);
    holder_clear((HolderObject *)self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef borrower_methods[] = {
    {"set_client", (PyCFunction)(void (*)(void))borrower_set_client, METH_O, NULL},
    {"borrow", (PyCFunction)(void (*)(void))borrower_borrow, METH_O, NULL},
    {"release", (PyCFunction)(void (*)(void))borrower_release, METH_O, NULL},
    {"end_lease", (PyCFunction)(void (*)(void))borrower_end_lease, METH_O, NULL},
    {"locks", (PyCFunction)(void (*)(void))borrower_locks, METH_NOARGS, NULL},
    {"close", (PyCFunction)(void (*)(void))borrower_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef borrower_members[] = {
    {"segment", T_OBJECT_EX, offsetof(BorrowerObject, segment), READONLY, NULL},
    {"client", T_UINT, offsetof(BorrowerObject, client), READONLY, NULL},
    {"attached", T_BOOL, offsetof(BorrowerObject, attached), READONLY, NULL},
    {"gathers", T_BOOL, offsetof(BorrowerObject, gathers), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject BorrowerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmbus_ext._core.Borrower",
    .tp_basicsize = sizeof(BorrowerObject),
    .tp_dealloc = (destructor)borrower_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = borrower_methods,
    .tp_members = borrower_members,
    .tp_init = (initproc)borrower_init,
    .tp_new = PyType_GenericNew,
};

/* ---- What the daemon says of trajectories, without Python work for each ---- */

static PyObject *pack_each(PyObject *items, size_t each,
                           void (*pack)(const TrajectoryObject *t, char *to)) {
    if (!PyList_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of trajectories");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(items);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)each);
    for (Py_ssize_t i = 0; packed != NULL && i < count; i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (!Py_IS_TYPE(item, &TrajectoryType)) {
            PyErr_Format(PyExc_TypeError, "expected trajectories, got %.100s",
                         Py_TYPE(item)->tp_name);
            Py_CLEAR(packed);
        } else {
            pack((const TrajectoryObject *)item, PyBytes_AS_STRING(packed) + (size_t)i * each);
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

/* places(trajectories) -> bytes, PLACE_BYTES each. */
static PyObject *places(PyObject *module, PyObject *items) {
    (void)module;
    return pack_each(items, sizeof(struct wire_place), pack_place);
}

/* identities(trajectories) -> bytes: producer_id and sequence, two native u64 each. */
static PyObject *identities(PyObject *module, PyObject *items) {
    (void)module;
    return pack_each(items, 2 * sizeof(uint64_t), pack_identity);
}

static PyMethodDef functions[] = {
    {"places", places, METH_O, NULL},
    {"identities", identities, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

bool borrower_add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, functions) == 0;
}
