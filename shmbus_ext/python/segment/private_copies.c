/* Views outlive their process's claim on the space, and a fork: records under views are copied into
 * memory of this process, which takes the place of the ring at the views' addresses.
 *
 * Invariants:
 *  - Read-only views point into the segment's mapping for views, and nothing else does; writable ones
 *    point into the mapping that all else uses, at records that only their reservation uses.
 *  - At a close, the copies are in place before any lock is dropped that keeps the space.
 *  - At a fork, the copies are made before it, while the parent holds the space, and take their place
 *    in the child before anything runs there: what the parent does then is not seen. */
#include "python/segment/private_copies.h"

#include <pthread.h>
#include <unistd.h>

#include "ring/file_lock.h"

static uint64_t offset_of(const SegmentObject *self, const struct record_place *place) {
    return self->c.data_offset + place->extent * self->c.extent_bytes + place->offset;
}

/* From the first to behind the last byte of some records, and how many are theirs. */
struct stretch {
    uint64_t first, end, bytes;
};

static void take_in(struct stretch *self, uint64_t offset, uint64_t bytes) {
    self->first = offset < self->first ? offset : self->first;
    self->end = offset + bytes > self->end ? offset + bytes : self->end;
    self->bytes += bytes;
}

/* Of all records under read-only views; false without memory. */
static bool copy_pinned(const SegmentObject *self, struct segment_copies *copies) {
    struct stretch all = {UINT64_MAX, 0, 0};
    for (const PinObject *p = self->pins; p != NULL; p = p->next) {
        take_in(&all, offset_of(self, &p->ref.place), p->ref.bytes);
    }
    copies->at = NULL;
    if (all.end == 0) {
        return true;
    }
    if (!segment_copies_begin(copies, all.first, all.end, all.bytes)) {
        return false;
    }
    for (const PinObject *p = self->pins; p != NULL; p = p->next) {
        segment_copies_add(copies, self->c.views, offset_of(self, &p->ref.place), p->ref.bytes);
    }
    return true;
}

/* Of all records under writable views. */
static bool copy_kept(const SegmentObject *self, struct segment_copies *copies) {
    struct stretch all = {UINT64_MAX, 0, 0};
    for (const KeeperObject *k = self->keepers; k != NULL; k = k->next) {
        take_in(&all, offset_of(self, &k->at.place), k->at.bytes);
    }
    copies->at = NULL;
    if (all.end == 0) {
        return true;
    }
    if (!segment_copies_begin(copies, all.first, all.end, all.bytes)) {
        return false;
    }
    for (const KeeperObject *k = self->keepers; k != NULL; k = k->next) {
        segment_copies_add(copies, self->c.base, offset_of(self, &k->at.place), k->at.bytes);
    }
    return true;
}

static bool replace(struct segment_copies *copies, uint8_t *mapping) {
    if (copies->at == NULL || segment_copies_replace(copies, mapping)) {
        return true;
    }
    segment_copies_drop(copies);
    return false;
}

/* Without memory for copies: the space is kept by the views' locks, as a borrower's is, and nothing
 * else of this reader or borrower is. Where not even that can be had, everything stays locked. */
static void keep_views_by_locks(SegmentObject *self) {
    int fd = self->c.fd;
    for (const PinObject *p = self->pins; p != NULL; p = p->next) {
        if (segment_lock_shared(fd, SHMBUS_LOCK_VIEW + p->ref.place.extent) != LOCK_TAKEN) {
            return;
        }
    }
    if (!self->c.read_only) {
        atomic_store_explicit(&self->c.header->lent, 1, memory_order_relaxed);
        segment_unlock(fd, SHMBUS_LOCK_COLLECTOR);
    }
    segment_unlock_range(fd, SHMBUS_LOCK_LEASE, (int64_t)SHMBUS_MAX_CLIENTS * SHMBUS_MAX_EXTENTS);
}

void py_segment_release_handle(SegmentObject *self) {
    if (self->handle_closed) {
        return;
    }
    self->handle_closed = true;
    if (self->generation != fork_generation) {
        return;
    }
    struct segment_copies copies;
    bool kept = copy_kept(self, &copies) && replace(&copies, self->c.base);
    if (kept) {
        for (KeeperObject *k = self->keepers; k != NULL; k = k->next) {
            if (k->pinned) {
                k->pinned = false;
                writer_unpin(&self->c, &k->at);
            }
        }
    }
    bool pinned = copy_pinned(self, &copies) && replace(&copies, self->c.views);
    if (!pinned) {
        keep_views_by_locks(self);
    }
    for (PinObject *p = self->pins; p != NULL; p = p->next) {
        p->reader = NULL;
    }
    if (kept && pinned) {
        close(self->c.fd);
        self->c.fd = -1;
    }
    /* Else the description stays open, and its locks keep the space until the last view is gone. */
}

/* ---- Fork ---- */

/* Whether this thread has made copies for the fork that it is in. */
static _Thread_local bool ready_to_fork;

static void before_fork(void) {
    /* Without the interpreter lock the lists may change meanwhile; nor can such a child run Python. */
    ready_to_fork = PyGILState_Check() != 0;
    for (SegmentObject *s = all_segments; ready_to_fork && s != NULL; s = s->next) {
        if (s->c.fd >= 0) {
            (void)copy_pinned(s, &s->pinned_at_fork);
            (void)copy_kept(s, &s->kept_at_fork);
        }
    }
}

static void after_fork_in_parent(void) {
    for (SegmentObject *s = all_segments; ready_to_fork && s != NULL; s = s->next) {
        segment_copies_drop(&s->pinned_at_fork);
        segment_copies_drop(&s->kept_at_fork);
    }
    ready_to_fork = false;
}

/* A copy of a file description keeps its locks, and with them the parent's proof of life, after the
 * parent has died. So the child closes what it inherited. */
static void after_fork_in_child(void) {
    fork_generation++;
    for (SegmentObject *s = all_segments; s != NULL; s = s->next) {
        if (s->c.fd >= 0) {
            segment_isolate(&s->c);
            if (ready_to_fork) {
                (void)replace(&s->pinned_at_fork, s->c.views);
                (void)replace(&s->kept_at_fork, s->c.base);
            }
            close(s->c.fd);
            s->c.fd = -1;
        }
    }
    ready_to_fork = false;
}

bool py_segment_init_fork(void) {
    return pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
}
