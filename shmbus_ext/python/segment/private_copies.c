/* Copies of records under views.
 *
 * Invariants:
 *  - The segment's mapping for views serves read-only views only. Writable views point into the
 *    common mapping, at records used only by their reservation.
 *  - At a close, the copies are in place before the locks keeping the space are dropped.
 *  - At a fork, the copies are made before the fork, while the parent holds the space. They take
 *    their place in the child before its first Python code, and hide the parent's later changes
 *    from the child. */
#include "python/segment/segment.h"

#include "base/file_lock.h"

static uint64_t offset_of(const struct segment *segment, const struct record_place *place) {
    return segment->data_offset + place->extent * segment->extent_bytes + place->offset;
}

static uint8_t *mapping_of(const struct segment *segment, bool writable) {
    return writable ? segment->base : segment->view_base;
}

bool py_copies_make(struct segment_copies *self, const struct segment *segment,
                    const struct list_link *views, bool writable) {
    /* The range of the records in the segment, and the sum of their sizes. */
    uint64_t first = UINT64_MAX, end = 0, bytes = 0;
    for (const struct list_link *l = views->next; l != views; l = l->next) {
        const struct view *view = LIST_ENTRY(l, struct view, link);
        if (view->writable == writable) {
            uint64_t offset = offset_of(segment, &view->ref.place);
            first = offset < first ? offset : first;
            end = offset + view->ref.bytes > end ? offset + view->ref.bytes : end;
            bytes += view->ref.bytes;
        }
    }
    self->at = NULL;
    if (end == 0) {
        return true;
    }
    if (!segment_copies_begin(self, first, end, bytes)) {
        return false;
    }
    for (const struct list_link *l = views->next; l != views; l = l->next) {
        const struct view *view = LIST_ENTRY(l, struct view, link);
        if (view->writable == writable) {
            segment_copies_add(self, mapping_of(segment, writable),
                               offset_of(segment, &view->ref.place), view->ref.bytes);
        }
    }
    return true;
}

bool py_copies_replace(struct segment_copies *self, struct segment *segment, bool writable) {
    if (self->at == NULL || segment_copies_replace(self, mapping_of(segment, writable))) {
        return true;
    }
    segment_copies_drop(self);
    return false;
}

void py_copies_lock_instead(const struct segment *segment, const struct list_link *views) {
    for (const struct list_link *l = views->next; l != views; l = l->next) {
        const struct view *view = LIST_ENTRY(l, struct view, link);
        if (!view->writable && file_lock_share(segment->fd, SHMBUS_LOCK_VIEW +
                                               view->ref.place.extent) != LOCK_TAKEN) {
            return;
        }
    }
    if (!segment->read_only) {
        SET_RELAXED(segment->header->lent, 1);
        file_lock_drop(segment->fd, SHMBUS_LOCK_COLLECTOR);
    }
    file_lock_drop_range(segment->fd, SHMBUS_LOCK_LEASE,
                         (int64_t)SHMBUS_MAX_CLIENTS * SHMBUS_MAX_EXTENTS);
}

/* ---- Holders of locks: one kernel query per lock found.
 *
 * Invariant: the search takes no lock and disturbs no holder. */
PyObject *py_locks_held(const struct segment *segment, unsigned int kind) {
    NEVER(kind > SHMBUS_MAX_CLIENTS, NULL);
    int64_t base = kind == 0 ? SHMBUS_LOCK_VIEW
                             : SHMBUS_LOCK_LEASE + (int64_t)(kind - 1) * SHMBUS_MAX_EXTENTS;
    int64_t end = base + SHMBUS_MAX_EXTENTS;
    PyObject *found = PyList_New(0);
    /* Ranges left to search: every lock found splits a range into two. */
    int64_t(*todo)[2] = PyMem_Malloc(sizeof *todo * (SHMBUS_MAX_EXTENTS + 2));
    if (found == NULL || todo == NULL) {
        PyMem_Free(todo);
        Py_XDECREF(found);
        return PyErr_NoMemory();
    }
    size_t left = 0;
    todo[left][0] = base;
    todo[left++][1] = end;
    while (found != NULL && left > 0) {
        int64_t from = todo[--left][0], to = todo[left][1];
        int64_t start = from, bytes = to - from;
        if (bytes <= 0 || file_lock_find(segment->fd, &start, &bytes) != LOCK_HELD_ELSEWHERE) {
            continue;
        }
        int64_t last = bytes == 0 || start + bytes > to ? to : start + bytes;
        start = start < from ? from : start;
        py_list_add(&found,
                    Py_BuildValue("(LL)", (long long)(start - base), (long long)(last - start)));
        if (left + 2 <= SHMBUS_MAX_EXTENTS + 2) {
            todo[left][0] = from;
            todo[left++][1] = start;
            todo[left][0] = last;
            todo[left++][1] = to;
        }
    }
    PyMem_Free(todo);
    return found;
}
