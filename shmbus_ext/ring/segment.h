/* The segment as one process sees it: mapped, checked, and with its own copy of the geometry.
 *
 * Invariant: after segment_open has said SHARED_OK, no bound is ever read from shared memory
 * again; all arithmetic uses the private copy in struct segment. */
#ifndef SHMBUS_RING_SEGMENT_H
#define SHMBUS_RING_SEGMENT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/random.h>

#include "base/shared_file.h"
#include "ring/layout.h"
#include "ring/request_parts.h"

/* ---- What tells one bus from all others, of whatever node and time: random bits, as digits too. */
#define IDENTITY_TEXT_BYTES (2 * SHMBUS_IDENTITY_BYTES + 1)

static inline void identity_text(char text[IDENTITY_TEXT_BYTES],
                                 const uint8_t identity[SHMBUS_IDENTITY_BYTES]) {
    for (size_t i = 0; i < SHMBUS_IDENTITY_BYTES; i++) {
        snprintf(text + 2 * i, 3, "%02x", identity[i]);
    }
}

/* Of the bus that a producer's records were put onto: this one, or one that it was restored from. */
static inline const uint8_t *identity_of_producer(const struct bus_header *header,
                                                  uint64_t producer_id) {
    for (uint32_t i = 0; i < SHMBUS_ANCESTORS; i++) {
        if (producer_id < header->ancestors[i].producers) {
            return header->ancestors[i].identity;
        }
    }
    return header->identity;
}

/* A new one, and its text; false with errno. */
static inline bool identity_make(uint8_t identity[SHMBUS_IDENTITY_BYTES],
                                 char text[IDENTITY_TEXT_BYTES]) {
    if (getrandom(identity, SHMBUS_IDENTITY_BYTES, 0) != (ssize_t)SHMBUS_IDENTITY_BYTES) {
        return false;
    }
    identity_text(text, identity);
    return true;
}

struct segment {
    int fd; /* a description of its own, for locks; not the one that is mapped */
    uint8_t *base;
    uint8_t *view_base; /* the same bytes, mapped read-only for views; NULL before the first */
    bool read_only; /* mapped and opened so: a borrower's */
    uint64_t bytes;
    uint64_t data_offset;
    uint64_t extent_bytes;
    uint32_t extent_count;
    uint32_t max_producers;
    uint32_t max_span;     /* extents that one record may take */
    uint64_t record_limit; /* bytes of the largest record, header included */
    uint64_t created_unix_ns;
    char identity[IDENTITY_TEXT_BYTES];
    struct bus_header *header;
    struct producer_slot *slots; /* max_producers + 1; the last is the collector's */
    struct extent_desc *extents;
    _Atomic uint64_t *intent_log;
    struct retry_entry *retries; /* SHMBUS_RETRY_ENTRIES */
    struct split_entry *splits;  /* SHMBUS_MAX_SPLITS */
    _Atomic uint64_t *cancelled; /* SHMBUS_CANCELLED */
    struct delivery_figures *figures;
    struct begun_row *begun; /* SHMBUS_BEGUN_ROWS */
    struct wait_row *waits;  /* as slots */
    struct lead_table *lead;
    struct relay_journal *relay;
    struct relay_entry *relay_entries;
    uint32_t relay_entry_count;
    uint32_t relay_next; /* this process's: where its search for a free entry goes on */
    struct request_parts requests;
    struct declared_part *declared; /* read through declared_schema.h */
    uint8_t *data;
    uint32_t found_version; /* after SHARED_BAD_VERSION */
    uint32_t found_hash;
    uint64_t found_bytes; /* after SHARED_TRUNCATED: the file's size */
};

/* What a segment is made of. */
struct segment_geometry {
    uint64_t segment_bytes;
    uint64_t data_offset;
    uint64_t extent_bytes;
    uint32_t extent_count;
    uint32_t max_producers;
    /* The bounds of lead.h, 0 for none; for segment_create. */
    uint32_t max_lead;
    uint32_t max_lead_versions; /* one more than the versions */
    /* What declared_schema_parse accepts, of the caller; 0 bytes for none. */
    const void *declared;
    uint32_t declared_bytes;
};

/* Capacity is the bytes for records; what the tables need comes on top. extent_bytes 0 chooses.
 * The plan is without a declared schema. False when the numbers cannot make a segment. */
bool segment_plan(uint64_t capacity, uint32_t max_producers, uint64_t extent_bytes,
                  struct segment_geometry *plan);

/* Gives the request lane of a plan so many bytes, in place of its share of the capacity. False where
 * there are too many. */
bool segment_plan_requests(struct segment_geometry *plan, uint64_t request_bytes);

/* Extents of a new segment that are leased to its future collector: producers may fill the bus
 * before it attaches, and what it then has to move out of the way needs a place. */
static inline uint32_t reserved_extents(uint32_t extent_count) {
    return extent_count > 1 ? 1 : 0;
}

static inline uint32_t segment_reserved(const struct segment *self) {
    return reserved_extents(self->extent_count);
}

/* Makes a segment of a new, empty file: allocates and touches all of it, and writes the tables, the
 * magic last. Takes fd over when it succeeds. */
enum shared_status segment_create(struct segment *self, int fd,
                                   const struct segment_geometry *plan);
/* Maps a segment and checks it. read_only: fd was opened so, and nothing is ever written through
 * the mapping. Takes fd over when it succeeds. */
enum shared_status segment_open(struct segment *self, int fd, bool read_only);
void segment_unmap(struct segment *self);

/* Maps the file once more, for views: nothing writes through it, neither shmbus nor code that
 * ignores that a view is read-only. */
enum shared_status segment_map_views(struct segment *self);

/* Copies of records, at the distances that these have in a mapping. One piece of address space,
 * however many they are; what lies between them takes no memory. */
struct segment_copies {
    uint8_t *at;     /* NULL for none */
    uint64_t offset; /* of `at` in the mapping */
    uint64_t bytes;
};
/* Room for copies of `bytes` that lie within [first, end) of a mapping; false without address
 * space. */
bool segment_copies_begin(struct segment_copies *self, uint64_t first, uint64_t end,
                          uint64_t bytes);
void segment_copies_add(struct segment_copies *self, const uint8_t *mapping, uint64_t offset,
                        uint64_t bytes);
/* Replaces that part of the mapping by the copies, and by nothing where there is none, so that
 * views into it outlive this process's claim on the space. `self` has no copies then. False, and
 * nothing has changed, where the kernel cannot. */
bool segment_copies_replace(struct segment_copies *self, uint8_t *mapping);
void segment_copies_drop(struct segment_copies *self);

/* Makes the whole mapping private, copied on writing: for a forked child. Views cannot be read any
 * more: what is in the file may be another record by now. */
void segment_isolate(struct segment *self);

static inline uint8_t *segment_extent(const struct segment *self, uint32_t extent) {
    return self->data + (uint64_t)extent * self->extent_bytes;
}

/* ---- Numbers of rounds that producers get without thinking, each handed out once.
 *
 * Invariants:
 * - No number is handed out twice on a bus, whoever dies: one addition takes it.
 * - The first number is the time at which the bus was made, in microseconds. So a bus that takes the
 *   place of a removed one, whose workers may still be in a round of that one, begins above all of
 *   its numbers, unless more than a million were taken in each second of its life.
 * - A number is a valid round, whatever somebody has scribbled over the counter. */
static inline void rounds_begin(struct bus_header *header, uint64_t created_unix_ns) {
    atomic_store_explicit(&header->next_round, created_unix_ns / 1000, memory_order_relaxed);
}

/* Of a restored bus: no number of the one before comes again. */
static inline void rounds_resume(struct bus_header *header, uint64_t next) {
    uint64_t own = atomic_load_explicit(&header->next_round, memory_order_relaxed);
    atomic_store_explicit(&header->next_round, next > own ? next : own, memory_order_relaxed);
}

static inline int64_t shmbus_next_round(struct bus_header *header) {
    uint64_t taken = atomic_fetch_add_explicit(&header->next_round, 1, memory_order_relaxed);
    return (int64_t)(taken & (uint64_t)INT64_MAX);
}

/* ---- A bus that was removed: its name is gone, and who still has it mapped learns so.
 *
 * Invariant: a removed bus stays one. The word that says so is the one that says whether producers
 * wait, so a put that finds the bus running looks at nothing more. */
/* Where the file has lost its last name: says so to all, once, and wakes everybody who waits. A
 * system call. Whether it has. A read-only mapping only looks. */
bool removal_note(struct segment *self);

static inline bool removal_happened(const struct segment *self) {
    return atomic_load_explicit(&self->header->paused, memory_order_acquire) == SHMBUS_REMOVED;
}

#endif
