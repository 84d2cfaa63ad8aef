/* A lane for its owner: claim room, fill it, publish or commit it.
 *
 * Invariants:
 *  - Only the holder of the slot's file lock writes a lane.
 *  - Within one process the caller serialises the calls on a writer (in Python, the interpreter
 *    lock), though not the filling of claimed room.
 *  - No call waits for space: a full bus is a return value. */
#pragma once

#include "record.h"
#include "requests.h"

struct writer {
    struct segment *segment;
    struct producer_slot *slot;
    uint32_t slot_index;
    uint64_t producer_id;
    uint64_t sequence;  /* commits of this producer */
    uint64_t committed; /* commits of the lane, by every owner */
    uint64_t aborted;   /* the same of aborts */

    uint32_t extent; /* the run for new records, or NO_EXTENT */
    uint32_t generation;
    uint64_t used; /* exposed bytes of the run */
    uint64_t run_bytes;
    uint64_t last_link; /* the lane's last run, from which the next run is linked, or 0 */

    uint32_t spare; /* leased ahead for a full bus, or NO_EXTENT */
    uint32_t spare_generation;

    uint64_t looked_back_ns; /* time of the last check of `ahead` */
    bool ahead; /* no look of the reader during this writer's last runs */
};

struct reservation {
    struct record_header *record;
    struct record_place place;
    uint64_t bytes;
    uint64_t admitted; /* the key of the group begun by this record, on a bus with a bound */
    struct request_claim answers; /* the claim answered, if any (requests.h) */
};

enum writer_status {
    WRITER_OK = 0,
    WRITER_FULL,
    WRITER_TOO_LARGE,
    WRITER_NO_SLOT,
    WRITER_SYSTEM_ERROR,
};

/* Takes a slot with a free lock, and completes its last owner's work. */
enum writer_status writer_attach(struct writer *self, struct segment *segment, const char *label);
/* writer_attach with a wait of up to half a second for a slot locked for a moment. */
enum writer_status writer_attach_in_time(struct writer *self, struct segment *segment,
                                         const char *label);
/* Attaches to the collector's own lane, under the collector's lock. */
void writer_attach_collector(struct writer *self, struct segment *segment);
/* Seals the lane. The caller closes the file description afterwards, which drops the lock. */
void writer_close(struct writer *self);

/* Claims room for a record in the lane; the caller notes begun groups and answered claims. */
enum writer_status writer_claim(struct writer *self, uint64_t bytes, struct reservation *out);

/* Exposes a filled record as committed, in one step. False, without effect, if the record answers a
 * lost claim. */
bool writer_publish(struct writer *self, const struct reservation *at);

/* Publishes n records in the room of one claim: every record or none. */
void writer_publish_all(struct writer *self, const struct reservation *at, uint32_t n);

/* Publishes a record already committed elsewhere; the record keeps its numbers. */
void writer_publish_moved(struct writer *self, const struct reservation *at, uint32_t state);

/* Two steps for a record filled later: expose a reserved record, then end the reservation. A commit
 * that returns false, as for a publish, becomes an abort. */
void writer_reserve(struct writer *self, const struct reservation *at);
bool writer_commit(struct writer *self, const struct reservation *at);
void writer_abort(struct writer *self, const struct reservation *at);

/* For a writable view of a record: keeps the run until the view is gone too. */
void writer_pin(struct writer *self, const struct reservation *at);
void writer_unpin(struct segment *segment, const struct reservation *at);

/* Leases one extent ahead, unless already leased. */
void writer_keep_spare(struct writer *self);

/* Seals the current run, to let the reader free it while the owner waits for space. */
void writer_seal(struct writer *self);
