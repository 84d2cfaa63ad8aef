/* A lane as its owner writes it: claim room, fill it, publish or commit it.
 *
 * Invariants:
 *  - Only the holder of the slot's file lock writes a lane.
 *  - Within one process the caller serialises the calls on a writer (in Python, the interpreter
 *    lock), though not the filling of what they claimed.
 *  - Nothing here waits for space: a full bus is an answer. */
#ifndef SHMBUS_RING_WRITER_H
#define SHMBUS_RING_WRITER_H

#include <stdbool.h>
#include <stdint.h>

#include "record.h"
#include "requests.h"

struct writer {
    struct segment *segment;
    struct producer_slot *slot;
    uint32_t slot_index;
    uint64_t producer_id;
    uint64_t sequence;  /* commits of this producer */
    uint64_t committed; /* commits of the lane, of all its owners */
    uint64_t aborted;   /* the same of aborts */

    uint32_t extent; /* the run that takes new records, or NO_EXTENT */
    uint32_t generation;
    uint64_t used; /* bytes of the run that are exposed */
    uint64_t run_bytes;
    uint64_t last_link; /* the lane's last run: what a new one is linked to, or 0 */

    uint32_t spare; /* leased ahead for when the bus is full, or NO_EXTENT */
    uint32_t spare_generation;


    uint64_t looked_back_ns; /* when `ahead` was last found out */
    bool ahead; /* the reader has not looked at the bus while this writer filled its last runs */
};

struct reservation {
    struct record_header *record;
    struct record_place place;
    uint64_t bytes;
    uint64_t admitted; /* the key of the group that this record begins, where groups are bounded */
    struct request_claim answers; /* what it answers, if anything (requests.h) */
};

enum writer_status {
    WRITER_OK = 0,
    WRITER_FULL,
    WRITER_TOO_LARGE,
    WRITER_NO_SLOT,
    WRITER_SYSTEM_ERROR,
};

/* Takes a slot whose lock is free, and ends what its last owner left there. */
enum writer_status writer_attach(struct writer *self, struct segment *segment, const char *label);
/* The same, but waits up to half a second for a slot whose lock is held for a moment only. */
enum writer_status writer_attach_in_time(struct writer *self, struct segment *segment,
                                         const char *label);
/* The collector's own lane; its lock is the collector's. */
void writer_attach_collector(struct writer *self, struct segment *segment);
/* Seals the lane. The caller closes the file description afterwards, which drops the lock. */
void writer_close(struct writer *self);

/* Room for a record in the lane; what it begins or answers is for the caller to note. */
enum writer_status writer_claim(struct writer *self, uint64_t bytes, struct reservation *out);

/* One step for a record that is filled already: expose it committed. False, and nothing happens,
 * where it answers a claim that is not held any more. */
bool writer_publish(struct writer *self, const struct reservation *at);

/* The same for n records that one claim has room for: all of them or none. */
void writer_publish_all(struct writer *self, const struct reservation *at, uint32_t n);

/* The same for a record that was committed before, elsewhere: it keeps its numbers. */
void writer_publish_moved(struct writer *self, const struct reservation *at, uint32_t state);

/* Two steps for one that is filled later: expose it reserved, and then end it; a commit that is
 * false, as for a publish, is aborted. */
void writer_reserve(struct writer *self, const struct reservation *at);
bool writer_commit(struct writer *self, const struct reservation *at);
void writer_abort(struct writer *self, const struct reservation *at);

/* For a writable view of a record: its run is kept until the view is gone too. */
void writer_pin(struct writer *self, const struct reservation *at);
void writer_unpin(struct segment *segment, const struct reservation *at);

/* Leases one extent ahead, unless one is. */
void writer_keep_spare(struct writer *self);

/* Seals the current run, so that the reader can free it while the owner waits for another. */
void writer_seal(struct writer *self);

#endif
