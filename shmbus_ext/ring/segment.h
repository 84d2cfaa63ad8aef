/* The segment as one process sees it: mapped, checked, and with its own copy of the geometry.
 *
 * Invariant: after segment_open has said SHARED_OK, no bound is ever read from shared memory
 * again; all arithmetic uses the private copy in struct segment. */
#ifndef SHMBUS_RING_SEGMENT_H
#define SHMBUS_RING_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/shared_file.h"
#include "ring/layout.h"

/* ---- How the request lane divides its bytes.
 *
 * Invariant: everything follows from the number of bytes between the tables and the extents, which is
 * part of the geometry: rows first, the rest is for prompts. So the lane states no size of its own
 * that a reader would have to trust. */
struct request_parts {
    struct request_lane *lane;
    struct request_row *rows;
    _Atomic uint32_t *order; /* rows of each priority, in the order of their offers */
    struct request_cell *cells;
    uint64_t *block_bits; /* of cells' blocks: 1 for taken */
    uint64_t *unit_bits;
    uint8_t *units;
    uint32_t row_count;
    uint32_t block_count;
    uint32_t unit_count;
};

/* The parts of so many bytes; only numbers where `at` is NULL. False for too few bytes. */
bool request_divide(struct request_parts *parts, uint8_t *at, uint64_t bytes);

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
    struct wait_row *waits;  /* as slots */
    struct lead_table *lead;
    struct relay_journal *relay;
    struct relay_entry *relay_entries;
    uint32_t relay_entry_count;
    uint32_t relay_next; /* this process's: where its search for a free entry goes on */
    struct request_parts requests;
    struct declared_part *declared; /* read by declared_schema_read */
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

/* Gives a plan's request lane so many bytes; false where there are too many. */
bool segment_plan_requests(struct segment_geometry *plan, uint64_t request_bytes);

/* Extents of a new segment that are leased to its future collector: producers may fill the bus
 * before it attaches, and what it then has to move out of the way needs a place. */
static inline uint32_t reserved_extents(uint32_t extent_count) {
    return extent_count > 1 ? 1 : 0;
}

static inline uint32_t segment_reserved(const struct segment *self) {
    return reserved_extents(self->extent_count);
}

/* Makes a segment of a new, empty file, the magic last. Takes fd over when it succeeds. */
enum shared_status segment_create(struct segment *self, int fd,
                                   const struct segment_geometry *plan);
/* Maps a segment and checks it; read_only never writes. Takes fd over when it succeeds. */
enum shared_status segment_open(struct segment *self, int fd, bool read_only);
void segment_unmap(struct segment *self);

/* Maps the file once more, for views, through which nothing can be written. */
enum shared_status segment_map_views(struct segment *self);

/* Copies of records at their distances in a mapping: one piece of address space. */
struct segment_copies {
    uint8_t *at;     /* NULL for none */
    uint64_t offset; /* of `at` in the mapping */
    uint64_t bytes;
};
/* Room for copies of records in [first, end); false without address space. */
bool segment_copies_begin(struct segment_copies *self, uint64_t first, uint64_t end,
                          uint64_t bytes);
void segment_copies_add(struct segment_copies *self, const uint8_t *mapping, uint64_t offset,
                        uint64_t bytes);
/* Replaces that part of the mapping by the copies, and by nothing where there is none, so that
 * views into it outlive this process's claim on the space. `self` has no copies then. False, and
 * nothing has changed, where the kernel cannot. */
bool segment_copies_replace(struct segment_copies *self, uint8_t *mapping);
void segment_copies_drop(struct segment_copies *self);

/* Makes the whole mapping private in a forked child; views cannot be read any more. */
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
/* Whether the file has lost its name, which all are told once; a system call. */
bool removal_note(struct segment *self);

static inline bool removal_happened(const struct segment *self) {
    return atomic_load_explicit(&self->header->paused, memory_order_acquire) == SHMBUS_REMOVED;
}

/* ---- The collector's bell: producers wake a collector that sleeps. It is one word, and the
 * collector is alone, so that whoever rings clears it and wakes in one step.
 *
 * Invariant: a reader that sleeps has stored 1 before it looked for records one last time; a producer
 * that published looks at the bell afterwards. Both are sequentially consistent, so one of them sees
 * the other, and no wake-up is lost. While nobody sleeps, neither side makes a system call. */
/* Producer, after it has published. Whether it woke a reader. */
bool doorbell_ring(struct bus_header *header);

/* What the bell says. */
enum doorbell_state { BELL_AWAKE = 0, BELL_ANNOUNCED = 1 };

/* Reader: announce sleep, look again, then doorbell_sleep or doorbell_stay. */
void doorbell_announce(struct bus_header *header);
void doorbell_stay(struct bus_header *header);
enum bell_wait doorbell_sleep(struct bus_header *header, int64_t timeout_ns);

/* ---- The pool of extents: leased by producers with one compare-and-swap, freed by the reader.
 *
 * Invariants: the low half of a descriptor's word is 0 exactly while the extent is free, and only
 * the holder of slot i writes i + 1 into it. The generation grows with every release, so a link or
 * a compare-and-swap from an earlier lease fails. */
#define NO_EXTENT UINT32_MAX

static inline uint64_t link_make(uint32_t generation, uint32_t low) {
    return ((uint64_t)generation << 32) | low;
}
static inline uint32_t link_generation(uint64_t link) {
    return (uint32_t)(link >> 32);
}
static inline uint32_t link_low(uint64_t link) {
    return (uint32_t)link;
}

/* Leases neighbouring extents: the first, or NO_EXTENT. Until extent_enter an orphan. */
uint32_t extent_lease(struct segment *segment, uint32_t slot, uint32_t span, uint32_t *generation);

/* Gives a lease its place in a lane. */
void extent_enter(struct segment *segment, uint32_t extent, uint32_t generation, uint32_t span,
                  uint64_t order, uint64_t producer_id);

/* Frees one extent if its word is still this one. At most one caller succeeds for a lease. */
bool extent_unlease(struct segment *segment, uint32_t extent, uint64_t word);

/* Keeps a lease and ends what it was entered as: no link to it holds any more. */
void extent_renew(struct segment *segment, uint32_t extent, uint64_t word);

/* Of a lease that this process holds. */
uint32_t extent_generation(const struct segment *segment, uint32_t extent);

struct run {
    uint32_t span;
    uint32_t generation;
    uint64_t order;
};

/* Whether `extent` heads a run that this slot has entered, within bounds. */
bool extent_is_run(const struct segment *segment, uint32_t extent, uint32_t slot, struct run *run);
/* The same for what a link names, generation included. */
bool link_is_run(const struct segment *segment, uint64_t link, uint32_t slot, struct run *run);

/* In ascending order. */
void extents_sort(uint32_t *extents, size_t count);

uint32_t extent_count_free(const struct segment *segment);

/* ---- The splits of a bus: who a group is for, as a number that records state and a label that
 * people give.
 *
 * Invariants:
 *  - A number keeps its label for as long as the bus exists. Number SHMBUS_SPLIT_TRAIN is "train".
 *  - No lock and no owner: whoever needs a label writes what is missing of it, each word from 0. So
 *    a death in the middle leaves the beginning of a label, which the next process that needs this
 *    label goes on with, and which is no label until then. */
/* Of a new segment: number SHMBUS_SPLIT_TRAIN gets its label. */
void splits_begin(const struct segment *segment);
/* The number of a label, new if need be; SHMBUS_MAX_SPLITS where all are taken. */
uint32_t split_number(const struct segment *segment, const char *label, uint32_t bytes);
/* The same without writing; SHMBUS_MAX_SPLITS where it has none. */
uint32_t split_find(const struct segment *segment, const char *label, uint32_t bytes);
/* Copies the label of a number, and returns its bytes; 0 where it has none (yet). */
uint32_t split_label(const struct segment *segment, uint32_t number,
                     char label[SHMBUS_SPLIT_LABEL_BYTES + 1]);

/* ---- The schema that a bus declares: which fields its records have, of which dtype and dimensions.
 *
 * Invariants:
 *  - The creator writes it before the magic, and nobody changes it.
 *  - A reader copies it, checks its checksum, and bounds each part of the copy before it uses it. */
/* One field; what it points at lies in the bytes that were parsed. */
struct declared_field {
    const char *name;
    const char *dtype;
    const uint8_t *dimensions; /* i64 each, unaligned: declared_schema_dimension reads one */
    uint16_t name_bytes;
    uint16_t dtype_bytes;
    uint32_t itemsize;
    uint8_t ndim;
    uint8_t flags;
};

struct declared_fields {
    uint32_t count;
    uint32_t dimension_names;
    const uint8_t *names[SHMBUS_MAX_DIMENSION_NAMES]; /* each a length and so many bytes */
    struct declared_field fields[SHMBUS_MAX_FIELDS];
};

/* False where the bytes are no schema; then nothing of `fields` may be used. */
bool declared_schema_parse(const uint8_t *bytes, uint32_t count, struct declared_fields *fields);

/* A size, SHMBUS_DIMENSION_FREE, or SHMBUS_DIMENSION_NAMED less the number of a name. */
int64_t declared_schema_dimension(const struct declared_field *field, uint32_t dimension);

/* For the creator, before the magic; at most SHMBUS_DECLARED_BYTES. */
void declared_schema_write(struct declared_part *part, const void *text, uint32_t bytes);

enum declared_status {
    DECLARED_NONE = 0,
    DECLARED_OK,
    DECLARED_DAMAGED, /* its length or its checksum is wrong */
};

/* Copies what the segment says. SHMBUS_DECLARED_BYTES have room in `text`. */
enum declared_status declared_schema_read(const struct declared_part *part, uint8_t *text,
                                          uint32_t *bytes);

/* ---- What a record is known by among all buses, as bytes that go between processes and nodes.
 *
 * Invariant: origins of one bus sort as (producer, sequence): numbers have their high bytes first. */
/* Offset  Size  Field
 *      0    16  identity     of the bus
 *     16     8  producer_id  the highest byte first
 *     24     8  sequence     the same */
#define RELAY_ORIGIN_BYTES (SHMBUS_IDENTITY_BYTES + 16u)

static inline void origin_pack_number(uint8_t *to, uint64_t number) {
    for (int i = 0; i < 8; i++) {
        to[i] = (uint8_t)(number >> (56 - 8 * i));
    }
}

static inline uint64_t origin_unpack_number(const uint8_t *from) {
    uint64_t number = 0;
    for (int i = 0; i < 8; i++) {
        number = number << 8 | from[i];
    }
    return number;
}

static inline void origin_pack(void *into, const uint8_t identity[SHMBUS_IDENTITY_BYTES],
                               uint64_t producer_id, uint64_t sequence) {
    uint8_t *to = into;
    memcpy(to, identity, SHMBUS_IDENTITY_BYTES);
    origin_pack_number(to + SHMBUS_IDENTITY_BYTES, producer_id);
    origin_pack_number(to + SHMBUS_IDENTITY_BYTES + 8, sequence);
}

#endif
