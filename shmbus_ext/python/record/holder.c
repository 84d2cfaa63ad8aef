/* What trajectories are made by (see holder.h): its strings, its schemas, and what it says of
 * itself. */
#include "python/record/holder.h"

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

void py_holder_note_packing(HolderObject *self) {
    if (self->packs) {
        return;
    }
    self->packs = true;
    if (!self->segment->c.read_only) {
        atomic_store_explicit(&self->segment->c.header->consumer_packs, 1, memory_order_relaxed);
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
