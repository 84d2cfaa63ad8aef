/* The segment in one process: mapped, checked, with a private copy of the geometry.
 *
 * Invariant: after SHARED_OK from segment_open, bounds never come from shared memory again;
 * arithmetic uses the private copy in struct segment. */
#pragma once

#include <stdio.h>
#include <string.h>

#include "base/shared_file.h"
#include "ring/layout.h"

/* ---- Division of the request lane's bytes.
 *
 * Invariant: every part follows from the number of bytes between the tables and the extents, a part
 * of the geometry: rows first, the rest for prompts. The lane states no size of its own for a
 * reader to trust. */
struct request_parts {
    struct request_lane *lane;
    struct request_row *rows;
    _Atomic uint32_t *order; /* rows by priority, in the order of their offers */
    struct request_cell *cells;
    uint64_t *block_bits; /* of cells' blocks: 1 for taken */
    uint64_t *unit_bits;
    uint8_t *units;
    uint32_t row_count;
    uint32_t block_count;
    uint32_t unit_count;
};

/* Divides `bytes` bytes; computes only numbers if `at` is NULL. False for too few bytes. */
bool request_divide(struct request_parts *parts, uint8_t *at, uint64_t bytes);

/* ---- The identity of a bus across nodes and times: random bits, also as digits. */
#define IDENTITY_TEXT_BYTES (2 * SHMBUS_IDENTITY_BYTES + 1)

static inline void identity_text(char text[IDENTITY_TEXT_BYTES],
                                 const uint8_t identity[SHMBUS_IDENTITY_BYTES]) {
    for (size_t i = 0; i < SHMBUS_IDENTITY_BYTES; i++) {
        snprintf(text + 2 * i, 3, "%02x", identity[i]);
    }
}

/* The identity of the bus that first received a producer's records: this bus, or an ancestor. */
static inline const uint8_t *identity_of_producer(const struct bus_header *header,
                                                  uint64_t producer_id) {
    for (uint32_t i = 0; i < SHMBUS_ANCESTORS; i++) {
        if (producer_id < header->ancestors[i].producers) {
            return header->ancestors[i].identity;
        }
    }
    return header->identity;
}

struct segment {
    int fd; /* a private description, for locks; not the mapped description */
    uint8_t *base;
    uint8_t *view_base; /* the same bytes, mapped read-only for views; NULL before the first */
    bool read_only; /* opened and mapped read-only, for a borrower */
    uint64_t bytes;
    uint64_t data_offset;
    uint64_t extent_bytes;
    uint32_t extent_count;
    uint32_t max_producers;
    uint32_t max_span;     /* most extents for one record */
    uint64_t record_limit; /* bytes of the largest record, header included */
    uint64_t created_unix_ns;
    char identity[IDENTITY_TEXT_BYTES];
    struct bus_header *header;
    struct producer_slot *slots; /* max_producers + 1; the last belongs to the collector */
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
    uint32_t relay_next; /* private: start of the next search for a free entry */
    struct request_parts requests;
    struct declared_part *declared; /* read by declared_schema_read */
    uint8_t *data;
    uint32_t found_version; /* after SHARED_BAD_VERSION */
    uint32_t found_hash;
    uint64_t found_bytes; /* after SHARED_TRUNCATED: the file's size */
};

/* The sizes and bounds of a segment. */
struct segment_geometry {
    uint64_t segment_bytes;
    uint64_t data_offset;
    uint64_t extent_bytes;
    uint32_t extent_count;
    uint32_t max_producers;
    /* The bounds of lead.h, 0: unbounded; for segment_create. */
    uint32_t max_lead;
    uint32_t max_lead_versions; /* bound in versions + 1 */
    /* Bytes accepted by declared_schema_parse, owned by the caller; 0 bytes: no schema. */
    const void *declared;
    uint32_t declared_bytes;
};

/* Capacity counts the bytes for records; the tables come on top. extent_bytes 0 selects a default.
 * The plan excludes a declared schema. False if the numbers cannot make a segment. */
bool segment_plan(uint64_t capacity, uint32_t max_producers, uint64_t extent_bytes,
                  struct segment_geometry *plan);

/* Gives `request_bytes` to a plan's request lane; false if too many. */
bool segment_plan_requests(struct segment_geometry *plan, uint64_t request_bytes);

/* Extents of a new segment leased to its future collector: producers may fill the bus before its
 * attach, and the collector then needs a place for moved records. */
static inline uint32_t reserved_extents(uint32_t extent_count) {
    return extent_count > 1 ? 1 : 0;
}

static inline uint32_t segment_reserved(const struct segment *self) {
    return reserved_extents(self->extent_count);
}

/* Makes a segment of a new, empty file, the magic last. Takes fd over when it succeeds. */
enum shared_status segment_create(struct segment *self, int fd,
                                   const struct segment_geometry *plan);
/* Maps a segment and checks it; read_only never writes. Takes ownership of fd on success. */
enum shared_status segment_open(struct segment *self, int fd, bool read_only);
/* Checks a file by its header, and places the tables behind it without a mapping: the pointers are
 * for distances from the header, never dereferenced. */
enum shared_status segment_survey(struct segment *self, uint8_t *header, uint64_t file_bytes);
void segment_unmap(struct segment *self);

/* Maps the file once more, read-only, for views. */
enum shared_status segment_map_views(struct segment *self);

/* Copies of records at their distances in a mapping: one piece of address space. */
struct segment_copies {
    uint8_t *at;     /* NULL: no copies */
    uint64_t offset; /* of `at` in the mapping */
    uint64_t bytes;
};
/* Room for copies of records in [first, end); false without address space. */
bool segment_copies_begin(struct segment_copies *self, uint64_t first, uint64_t end,
                          uint64_t bytes);
void segment_copies_add(struct segment_copies *self, const uint8_t *mapping, uint64_t offset,
                        uint64_t bytes);
/* Replaces the part of the mapping by the copies, and by nothing between copies, to let views
 * outlive this process's claim on the space. Empties `self`. False, without a change, if the kernel
 * refuses. */
bool segment_copies_replace(struct segment_copies *self, uint8_t *mapping);
void segment_copies_drop(struct segment_copies *self);

/* Makes the whole mapping private in a forked child, and views unreadable. */
void segment_isolate(struct segment *self);

static inline uint8_t *segment_extent(const struct segment *self, uint32_t extent) {
    return self->data + (uint64_t)extent * self->extent_bytes;
}

/* ---- Unique round numbers for producers.
 *
 * Invariants:
 * - No number is handed out twice on a bus, despite deaths: a single addition takes a number.
 * - The first number holds the creation time of the bus, in microseconds. A bus that replaces a
 *   removed bus, with workers still in an old round, hence begins above the old numbers, unless
 *   producers took more than a million numbers in every second of the old bus.
 * - Every number is a valid round, even from a scribbled counter. */
static inline void rounds_begin(struct bus_header *header, uint64_t created_unix_ns) {
    SET_RELAXED(header->next_round, created_unix_ns / 1000);
}

/* For a restored bus: skips the numbers of its predecessor. */
static inline void rounds_resume(struct bus_header *header, uint64_t next) {
    uint64_t own = RELAXED(header->next_round);
    SET_RELAXED(header->next_round, next > own ? next : own);
}

static inline int64_t shmbus_next_round(struct bus_header *header) {
    uint64_t taken = atomic_fetch_add_explicit(&header->next_round, 1, memory_order_relaxed);
    return (int64_t)(taken & (uint64_t)INT64_MAX);
}

/* ---- A removed bus: its name is gone, and processes with a mapping learn of the removal.
 *
 * Invariant: a removed bus stays removed. One word holds both removal and pause: a put on a running
 * bus reads no further word. */
/* Returns true if the file has lost its name, after a notice to every process; a system call. */
bool removal_note(struct segment *self);

static inline bool removal_happened(const struct segment *self) {
    return ACQUIRE(self->header->paused) == SHMBUS_REMOVED;
}

/* Kinds of waiters at `space_bell`: for a free extent, and to begin a group, a bit for each part of
 * the groups' keys (lead.h). */
#define SPACE_FREED UINT32_C(1)
#define SPACE_ADMITS (~SPACE_FREED)
/* Kinds of waiters at the request lane's `work`: idle workers, and workers at rest after failures,
 * which take no sample. */
#define WORK_IDLE UINT32_C(1)
#define WORK_RESTS UINT32_C(2)

/* ---- The collector's bell: producers wake a sleeping collector. One word suffices for a single
 * collector: a ring clears the word and wakes in one step.
 *
 * Invariant: a sleeping reader has stored 1 before its last look for records; a producer looks at
 * the bell after its publish. Both are sequentially consistent: one of the two sees the other, and
 * no wake-up gets lost. While the collector is awake, neither side makes a system call. */
/* For a producer, after a publish. Returns true if it woke the reader. */
bool doorbell_ring(struct bus_header *header);

/* States of the bell. */
enum doorbell_state { BELL_AWAKE = 0, BELL_ANNOUNCED = 1 };

/* Reader: announce sleep, look again, then doorbell_sleep or doorbell_stay. */
void doorbell_announce(struct bus_header *header);
void doorbell_stay(struct bus_header *header);
enum bell_wait doorbell_sleep(struct bus_header *header, int64_t timeout_ns);

/* ---- The pool of extents: leased by producers with one compare-and-swap, freed by the reader.
 *
 * Invariants: the low half of a descriptor's word is 0 exactly while the extent is free, and only
 * the holder of slot i writes i + 1 into the word. The generation grows with every release, to fail
 * links and compare-and-swaps of an earlier lease. */
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

/* Frees an extent if its word still equals `word`. At most one caller succeeds for a lease. */
bool extent_unlease(struct segment *segment, uint32_t extent, uint64_t word);

/* Keeps a lease under a new generation, which invalidates links to the old entry. */
void extent_renew(struct segment *segment, uint32_t extent, uint64_t word);

/* For an extent leased by this process. */
uint32_t extent_generation(const struct segment *segment, uint32_t extent);

struct run {
    uint32_t span;
    uint32_t generation;
    uint64_t order;
};

/* Returns true if `extent` heads a run entered by this slot, within bounds. */
bool extent_is_run(const struct segment *segment, uint32_t extent, uint32_t slot, struct run *run);
/* extent_is_run for a link, generation included. */
bool link_is_run(const struct segment *segment, uint64_t link, uint32_t slot, struct run *run);

/* In ascending order. */
void extents_sort(uint32_t *extents, size_t count);

uint32_t extent_count_free(const struct segment *segment);

/* ---- The splits of a bus: the purpose of a group, as a number in records and a label for people.
 *
 * Invariants:
 *  - A number keeps its label for the lifetime of the bus. Number SHMBUS_SPLIT_TRAIN is "train".
 *  - No lock and no owner: a process that needs a label writes its missing words, each from 0. A
 *    death in the middle leaves a partial label, invalid until the next user of the label completes
 *    it. */
/* For a new segment: labels number SHMBUS_SPLIT_TRAIN. */
void splits_begin(const struct segment *segment);
/* The number of a label, new if needed; SHMBUS_MAX_SPLITS if the table is full. */
uint32_t split_number(const struct segment *segment, const char *label, uint32_t bytes);
/* split_number without writes; SHMBUS_MAX_SPLITS for an unknown label. */
uint32_t split_find(const struct segment *segment, const char *label, uint32_t bytes);
/* Copies the label of a number and returns its bytes; 0 without a label (yet). */
uint32_t split_label(const struct segment *segment, uint32_t number,
                     char label[SHMBUS_SPLIT_LABEL_BYTES + 1]);

/* ---- The declared schema of a bus: the fields of its records, with dtypes and dimensions.
 *
 * Invariants:
 *  - The creator writes the schema before the magic, and no process changes it.
 *  - A reader copies the schema, verifies its checksum, and bounds every part of the copy before
 *    use. */
/* One field; its pointers lead into the parsed bytes. */
struct declared_field {
    const char *name;
    const char *dtype;
    const uint8_t *dimensions; /* i64 values, unaligned: declared_schema_dimension reads one */
    uint16_t name_bytes;
    uint16_t dtype_bytes;
    uint32_t itemsize;
    uint8_t ndim;
    uint8_t flags;
};

struct declared_fields {
    uint32_t count;
    uint32_t dimension_names;
    const uint8_t *names[SHMBUS_MAX_DIMENSION_NAMES]; /* length byte and name for every entry */
    struct declared_field fields[SHMBUS_MAX_FIELDS];
};

/* False for bytes that form no schema; `fields` is then unusable. */
bool declared_schema_parse(const uint8_t *bytes, uint32_t count, struct declared_fields *fields);

/* A size, SHMBUS_DIMENSION_FREE, or SHMBUS_DIMENSION_NAMED less the number of a name. */
static inline int64_t declared_schema_dimension(const struct declared_field *field,
                                                uint32_t dimension) {
    int64_t size;
    memcpy(&size, field->dimensions + (uint64_t)dimension * sizeof size, sizeof size);
    return size;
}

/* For the creator, before the magic; at most SHMBUS_DECLARED_BYTES. */
void declared_schema_write(struct declared_part *part, const void *text, uint32_t bytes);

enum declared_status {
    DECLARED_NONE = 0,
    DECLARED_OK,
    DECLARED_DAMAGED, /* wrong length or checksum */
};

/* Copies the segment's schema into `text`, of at least SHMBUS_DECLARED_BYTES bytes. */
enum declared_status declared_schema_read(const struct declared_part *part, uint8_t *text,
                                          uint32_t *bytes);

/* ---- The origin of a record across buses, as bytes exchanged between processes and nodes.
 *
 * Invariant: origins of one bus sort as (producer, sequence), because numbers are big-endian. */
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
