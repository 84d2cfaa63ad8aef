/* Records under views, copied into memory of this process, which takes the place of the ring at the
 * views' addresses: views outlive their process's claim on the space, and a fork. */
#ifndef SHMBUS_PYTHON_PRIVATE_COPIES_H
#define SHMBUS_PYTHON_PRIVATE_COPIES_H

#include "python/list.h"
#include "ring/record.h"
#include "ring/segment.h"

/* A record that arrays look at. */
struct view {
    struct list_link link;
    struct record_ref ref;
    bool writable; /* in the mapping that all else uses; else in the one for views */
    /* The segment's handle is closed. detached: the record has its copy, and no lock is needed. */
    void (*handle_closed)(struct view *view, bool detached);
};

/* Copies all records of `views` that are writable, or all that are not; false without memory. */
bool py_copies_make(struct segment_copies *self, const struct segment *segment,
                    const struct list_link *views, bool writable);
/* Puts them in the place of the ring, in the same mapping; false, without copies, where the kernel
 * cannot. */
bool py_copies_replace(struct segment_copies *self, struct segment *segment, bool writable);
/* Without memory for copies: the views' locks keep the space, as a borrower's do, and nothing else
 * of this reader or borrower stays locked. Where view locks fail too, everything stays locked. */
void py_copies_lock_instead(const struct segment *segment, const struct list_link *views);

#endif
