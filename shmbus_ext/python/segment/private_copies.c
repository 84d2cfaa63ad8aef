/* Copies of records under views (see private_copies.h).
 *
 * Invariants:
 *  - Read-only views point into the segment's mapping for views, and nothing else does. Writable
 *    views point into the mapping that all else uses, at records that only their reservation uses.
 *  - At a close, the copies are in place before any lock is dropped that keeps the space.
 *  - At a fork, the copies are made before it, while the parent holds the space. They take their
 *    place in the child before anything runs there, so it sees nothing of what the parent does
 *    then. */
#include "python/segment/private_copies.h"

#include "base/file_lock.h"

static uint64_t offset_of(const struct segment *segment, const struct record_place *place) {
    return segment->data_offset + place->extent * segment->extent_bytes + place->offset;
}

static uint8_t *mapping_of(const struct segment *segment, bool writable) {
    return writable ? segment->base : segment->view_base;
}

bool py_copies_make(struct segment_copies *self, const struct segment *segment,
                    const struct list_link *views, bool writable) {
    /* From the first to behind the last byte of the records, and how many are theirs. */
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
        atomic_store_explicit(&segment->header->lent, 1, memory_order_relaxed);
        file_lock_drop(segment->fd, SHMBUS_LOCK_COLLECTOR);
    }
    file_lock_drop_range(segment->fd, SHMBUS_LOCK_LEASE,
                         (int64_t)SHMBUS_MAX_CLIENTS * SHMBUS_MAX_EXTENTS);
}
