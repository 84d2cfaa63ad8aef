/* One record: layout of its parts, checksums, and checks on reading.
 *
 * Invariant: record_read_* hands out copied and bounded values; a record in shared memory may
 * change at any time, even during a read. */
#pragma once

#include "layout.h"

/* A producer's description of a trajectory. For every field, shape holds an offset (filled by
 * record_plan) and then ndim sizes; schema holds field_count schema_entry's with their names and
 * dtypes. */
struct record_spec {
    const char *id;
    const uint8_t *schema;
    uint64_t *shape;
    const uint64_t *field_bytes;
    const uint8_t *field_ndim;
    uint64_t meta_bytes;
    int64_t policy_version;
    int64_t round;
    double score;
    uint32_t schema_bytes;
    uint32_t shape_words;
    uint32_t id_bytes;
    uint32_t field_count;
    uint32_t group_size;
    uint32_t need; /* 0: the whole group */
    uint32_t index;
    uint32_t split;
    uint32_t version_span; /* the newest policy version - policy_version */
    uint32_t flags;
    /* Filled by record_plan. */
    uint64_t record_bytes;
    uint64_t payload_bytes;
    uint32_t meta_offset;
};

/* False if the sum overflows a record's limits. */
bool record_plan(struct record_spec *spec);

/* The place of a record, under the frame's checksum: stale bytes never pass for a record. */
struct record_place {
    uint32_t extent;
    uint32_t generation;
    uint64_t offset;
};

/* The collector's reference to a record. */
struct record_ref {
    struct record_place place;
    uint64_t bytes;
};

/* A place in one word, as in the intents: the extent above these bits, below them the offset in
 * units of SHMBUS_RECORD_ALIGN. The generation is stored separately. */
#define REF_OFFSET_BITS 40
_Static_assert(SHMBUS_MAX_EXTENTS <= UINT64_C(1) << (64 - REF_OFFSET_BITS),
               "a packed place has room for each extent");

static inline uint64_t place_pack(const struct record_place *place) {
    return ((uint64_t)place->extent << REF_OFFSET_BITS) | (place->offset / SHMBUS_RECORD_ALIGN);
}

/* Not bounded yet, and of generation 0. */
static inline struct record_place place_unpack(uint64_t word) {
    return (struct record_place){
        .extent = (uint32_t)(word >> REF_OFFSET_BITS),
        .offset = (word & ((UINT64_C(1) << REF_OFFSET_BITS) - 1)) * SHMBUS_RECORD_ALIGN,
    };
}

/* Writes the frame, sufficient for a walk, before the record's exposure. */
void record_write_frame(struct record_header *record, const struct record_place *place,
                        uint64_t record_bytes, uint64_t producer_id, uint32_t slot, uint32_t flags);
/* Everything else but sequence, lane_number, time and checksum. */
void record_write_body(struct record_header *record, const struct record_spec *spec);
/* Copies a record's image except the state, maybe unaligned, with a frame of its new place. */
void record_copy_image(struct record_header *to, const struct record_place *place,
                       const void *image, uint64_t record_bytes, uint64_t producer_id,
                       uint32_t slot, uint32_t flags);
/* Closes a record's header, before COMMITTED; lengths that lead beyond the record are ignored. */
void record_close(struct record_header *record, uint64_t bytes, uint64_t sequence,
                  uint64_t lane_number);

/* Recomputes the header's checksum after a change of the frame. */
void record_reseal(struct record_header *record, uint64_t bytes);

/* Shape, id and schema. */
static inline uint64_t record_tables_bytes(const struct record_header *header) {
    return (uint64_t)header->shape_words * 8 + header->id_bytes + header->schema_bytes;
}
/* The expected checksum of the header with these tables. */
uint32_t record_header_crc(const struct record_header *header, const void *tables);

enum record_verdict {
    RECORD_OK = 0,
    RECORD_BAD_FRAME,  /* untrusted length: later bytes of the run are unreachable */
    RECORD_BAD_HEADER, /* valid length: only this record is lost */
    RECORD_BAD_PAYLOAD,
};

#define RECORD_SCRATCH_BYTES                                                                     \
    (SHMBUS_MAX_SHAPE_WORDS * 8u + SHMBUS_MAX_ID_BYTES + SHMBUS_MAX_SCHEMA_BYTES + 64u)

/* The reader's own copy of a record's header and tables. */
struct record_copy {
    struct record_header header; /* header.state holds the acquired state */
    const uint64_t *shape;
    const char *id;
    const uint8_t *schema;
    alignas(8) uint8_t scratch[RECORD_SCRATCH_BYTES];
};

/* Returns true if the flags are consistent: only a failure may lack the size of its group. */
static inline bool record_flags_hold(uint32_t flags) {
    return (flags & (SHMBUS_FLAG_FAILED | SHMBUS_FLAG_NO_SIZE)) != SHMBUS_FLAG_NO_SIZE;
}

/* Frame only: enough to step over. */
enum record_verdict record_read_frame(const struct record_header *shared, uint64_t room,
                                      const struct record_place *place, struct record_header *copy);
/* Completes a copy: header checksum and bounds; the record may be unaligned. */
enum record_verdict record_read_tables(const void *shared, struct record_copy *copy);
/* record_read_tables plus the payload checksum, if present. */
enum record_verdict record_read_body(const void *shared, struct record_copy *copy);

/* Writes the head of a checked copy behind a frame: header and tables. */
void record_write_head(struct record_header *record, const struct record_copy *copy);
