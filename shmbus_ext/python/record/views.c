/* Base objects of arrays in the ring.
 *
 * Invariants: a record's space is kept while a view of the record is out. At the close of the
 * segment's handle every view gets a private copy, and afterwards no view calls its holder or lane.
 * A read-only view lies in the segment's mapping for views. */
#include "python/hooks.h"
#include "python/record/record.h"


/* ---- Keeper: behind writable views ---- */

static void keeper_handle_closed(struct view *view, bool detached) {
    KeeperObject *self = LIST_ENTRY(view, KeeperObject, view);
    if (detached && self->pinned) {
        self->pinned = false;
        writer_unpin(&self->segment->c, &self->at);
    }
}

KeeperObject *py_keeper_new(SegmentObject *segment, const struct reservation *at) {
    KeeperObject *self = PyObject_New(KeeperObject, &KeeperType);
    if (self != NULL) {
        self->segment = (SegmentObject *)Py_NewRef((PyObject *)segment);
        self->at = *at;
        self->pinned = false;
        self->view.ref = (struct record_ref){at->place, at->bytes};
        self->view.writable = true;
        self->view.handle_closed = keeper_handle_closed;
        py_segment_add_view(segment, &self->view);
    }
    return self;
}

static void py_keeper_dealloc(KeeperObject *self) {
    list_unlink(&self->view.link);
    if (self->pinned && self->segment->generation == fork_generation) {
        writer_unpin(&self->segment->c, &self->at);
    }
    Py_DECREF(self->segment);
    PyObject_Free(self);
}

PyTypeObject KeeperType = {
    TYPE_BASICS("Keeper", KeeperObject, py_keeper_dealloc, 0),
};

/* ---- Pin: behind read-only views ---- */

/* The holder closes the handle before its own end. */
static void pin_handle_closed(struct view *view, bool Py_UNUSED(detached)) {
    LIST_ENTRY(view, PinObject, view)->holder = NULL;
}

PinObject *py_pin_new(HolderObject *holder, const struct record_ref *ref) {
    if (holder->segment->c.view_base == NULL && !py_segment_map_views(holder->segment)) {
        return NULL;
    }
    if (!holder->kind->counts && !holder->kind->hold(holder, ref, 1)) {
        return NULL;
    }
    PinObject *self = PyObject_New(PinObject, &PinType);
    if (self != NULL) {
        self->segment = (SegmentObject *)Py_NewRef((PyObject *)holder->segment);
        self->holder = holder;
        self->view.ref = *ref;
        self->view.writable = false;
        self->view.handle_closed = pin_handle_closed;
        py_segment_add_view(self->segment, &self->view);
    } else if (!holder->kind->counts) {
        holder->kind->let_go(holder, ref, 1);
    }
    return self;
}

static void py_pin_dealloc(PinObject *self) {
    list_unlink(&self->view.link);
    if (self->holder != NULL && self->segment->generation == fork_generation) {
        self->holder->kind->let_go(self->holder, &self->view.ref, 1);
    }
    Py_DECREF(self->segment);
    PyObject_Free(self);
}

PyTypeObject PinType = {
    TYPE_BASICS("Pin", PinObject, py_pin_dealloc, 0),
};

/* ---- Holder base: strings, schemas and flags shared by Reader and Borrower. */
bool py_holder_init(HolderObject *self, SegmentObject *segment, const struct holder_kind *kind) {
    self->segment = (SegmentObject *)Py_NewRef((PyObject *)segment);
    self->kind = kind;
    self->schemas = PyDict_New();
    self->ids = PyMem_Calloc(ID_TABLE, sizeof *self->ids);
    if (self->schemas == NULL || self->ids == NULL) {
        PyErr_NoMemory();
        return false;
    }
    return true;
}

bool py_holder_usable(HolderObject *self) {
    if (!self->attached) {
        return py_refuse(hooks.closed_error, "this Consumer is closed; make a new one");
    }
    return py_segment_usable(self->segment, "Consumer");
}

void py_holder_note_packing(HolderObject *self) {
    if (self->packs) {
        return;
    }
    self->packs = true;
    if (!self->segment->c.read_only) {
        SET_RELAXED(self->segment->c.header->consumer_packs, 1);
    }
}

void py_holder_clear(HolderObject *self) {
    for (uint32_t i = 0; self->ids != NULL && i < ID_TABLE; i++) {
        Py_XDECREF(self->ids[i]);
    }
    PyMem_Free(self->ids);
    Py_XDECREF(self->schemas);
    Py_XDECREF(self->last_schema);
    Py_XDECREF(self->segment);
}
