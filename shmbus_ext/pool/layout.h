/* The bytes of a slot pool shared by processes: structs and lock bytes. LAYOUT.md of this folder
 * has the offsets, the writers, and the ordering argument.
 *
 * A pool consists of n slots of bytes with one publisher, or one for every rank, many readers, and
 * versions. It forms a separate segment beside a bus, for data larger than a record: weights,
 * activations.
 *
 * File:  | pool_header | slot_row[POOL_MAX_SLOTS] | rank_row[POOL_MAX_RANKS]
 *        | reader_row[POOL_MAX_READERS] | pad | slot 0 | slot 1 | ... |
 * Slot:  | payload | meta | digests (u32 a block) | patches, one a rank | pad |
 * Rules: fixed-width types only, no pointers; a field touched concurrently by two processes is
 * _Atomic; an offset or a size that moves needs a new POOL_LAYOUT_VERSION. */
#pragma once

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bell.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the pool is little-endian; this machine is not"
#endif

#define POOL_MAGIC UINT64_C(0x314C4F4F50424853) /* "SHBPOOL1" */
#define POOL_LAYOUT_VERSION 2u
#define POOL_PAGE 4096u
/* Slots of a huge page or more begin at a multiple of a huge page, to allow large pages. */
#define POOL_HUGE_PAGE (UINT64_C(2) << 20)

/* Every slot costs memory for a whole set; eight exceed the needs of every pipeline. */
#define POOL_MAX_SLOTS 8u
/* Ranks on one host that write a version together. */
#define POOL_MAX_RANKS 64u
#define POOL_MAX_READERS 128u
#define POOL_LABEL_BYTES 48u
#define POOL_DEVICE_BYTES 40u /* the text of a UUID, and more */
#define POOL_TEXT_BYTES 64u   /* of a version's name */
#define POOL_ERROR_BYTES 120u
/* A version's metadata beside its bytes, for example a manifest. */
#define POOL_MAX_META_BYTES (UINT64_C(64) << 20)
#define POOL_MIN_BLOCK (UINT64_C(1) << 20)
#define POOL_MAX_BLOCK (UINT64_C(64) << 20)
#define POOL_MAX_SLOT_BYTES (UINT64_C(1) << 44)
/* Alignment of a rank's share of a slot's patch bytes. */
#define POOL_PATCH_ALIGNMENT 64u

/* The location of a version in one atomic word: sequence << 8 | slot + 1; 0: no version. Sequences
 * grow by one a version and begin at 1. */
#define POOL_NO_VERSION UINT64_C(0)

struct pool_header {
    _Atomic uint64_t magic;
    uint32_t layout_version;
    uint32_t max_slots;
    uint64_t file_bytes;
    uint64_t slots_offset;
    uint64_t slot_stride;
    uint64_t slot_bytes; /* of payload */
    uint64_t meta_bytes;
    uint64_t block_bytes; /* bytes covered by a digest */
    uint64_t created_unix_ns;
    uint64_t patch_bytes; /* of every rank's patches; 0: no patches */
    uint32_t geometry_crc;
    uint32_t reserved1;
    uint64_t life; /* random: with a sequence, the unique name of a publication across pools */

    alignas(128) _Atomic uint64_t latest;
    _Atomic uint64_t writing;
    _Atomic uint64_t next_sequence;
    alignas(64) struct bell bell;
    alignas(64) struct bell space_bell;
    alignas(64) struct bell ranks_bell;
    alignas(64) _Atomic uint32_t slots_open;
    uint32_t reserved2;
    _Atomic uint64_t published;
    _Atomic uint64_t skipped;
};
#define POOL_HEADER_BYTES 4096u
#define POOL_GEOMETRY_TO 80u
_Static_assert(sizeof(struct pool_header) <= POOL_HEADER_BYTES, "the header has its place");
_Static_assert(offsetof(struct pool_header, geometry_crc) == POOL_GEOMETRY_TO, "layout");
_Static_assert(offsetof(struct pool_header, bell) == 192, "layout");
_Static_assert(offsetof(struct pool_header, space_bell) == 256, "layout");
_Static_assert(offsetof(struct pool_header, ranks_bell) == 320, "layout");

/* State values are spread over the word: scribbled bytes seldom form a valid state. */
enum pool_slot_state {
    POOL_EMPTY = 0,
    POOL_WRITING = 0x54495257, /* "WRIT" */
    POOL_READY = 0x59444552,   /* "REDY" */
};

/* The contents of a slot. Written under the slot's exclusive lock, `state` last; read under a
 * shared lock; without a lock, only for messages and after the checksum. */
struct slot_row {
    alignas(256) _Atomic uint32_t state;
    uint32_t crc;
    uint64_t sequence;
    int64_t version; /* the publisher's number */
    uint64_t bytes;  /* of payload in use */
    uint64_t meta_bytes;
    uint32_t meta_crc;
    uint32_t digests; /* number of blocks with a digest; 0: no digests */
    uint32_t ranks;   /* number of writing ranks */
    uint32_t reserved0;
    uint64_t published_unix_ns;
    char text[POOL_TEXT_BYTES]; /* the version's name */
    /* During a write: base_sequence names the base of its patches, kept_sequence the version still
     * in the slot's bytes; 0: no such version. For a whole version: base_sequence names the version
     * that the patches turn into this version; 0 if a patch is missing. */
    uint64_t base_sequence;
    uint64_t kept_sequence;
    int64_t base_version;
    uint8_t reserved1[96];
};
#define POOL_ROW_CRC_FROM 8u
_Static_assert(sizeof(struct slot_row) == 256, "layout");

/* A rank's patch, in its share of the slot's patch bytes. Written under the rank's piece or the
 * slot's lock, read like the payload. The runs follow: one a piece of a tensor, and its stream,
 * padded to 8. */
struct patch_head {
    uint64_t sequence;
    uint64_t base_sequence;
    uint64_t bytes;
    uint64_t changes;
    uint32_t runs;
    uint8_t reserved0[24];
    uint32_t crc;
};
#define PATCH_HEAD_CRC_TO 60u
_Static_assert(sizeof(struct patch_head) == 64, "layout");
_Static_assert(offsetof(struct patch_head, crc) == PATCH_HEAD_CRC_TO, "layout");

/* A piece: `rows` rows of `row_bytes` bytes, `stride` bytes apart, from `offset` of the payload on,
 * and in its stream the changes (patch_code.h). */
struct patch_run {
    uint64_t offset;
    uint64_t rows;
    uint64_t row_bytes;
    uint64_t stride;
    uint64_t bytes; /* of the unpadded stream */
    uint64_t changes;
    uint64_t base_digest; /* of the old elements */
    uint32_t width;
    uint32_t reserved0;
};
_Static_assert(sizeof(struct patch_run) == 64, "layout");

/* Progress of a rank: sequences being written, written, and failed. The holder of lock byte
 * POOL_LOCK_WRITER + rank owns the row; a regular end stores pid 0. */
struct rank_row {
    alignas(256) _Atomic uint64_t started;
    _Atomic uint64_t done;
    _Atomic uint64_t failed;
    _Atomic uint32_t pid;
    char label[POOL_LABEL_BYTES];
    char error[POOL_ERROR_BYTES];
    uint8_t reserved0[60];
};
_Static_assert(sizeof(struct rank_row) == 256, "layout");

/* The version run by a reader, and its last refusal; `applied` and `refused` are stored last. The
 * holder of POOL_LOCK_READER + index owns the row; a regular end stores pid 0. */
struct reader_row {
    alignas(256) _Atomic uint64_t applied;
    _Atomic uint64_t refused;
    _Atomic int64_t applied_version;
    _Atomic int64_t refused_version;
    _Atomic uint32_t holds;
    _Atomic uint32_t pid;
    _Atomic int32_t error_code;
    char label[POOL_LABEL_BYTES];
    char device[POOL_DEVICE_BYTES];
    char error[POOL_ERROR_BYTES];
    uint32_t reserved0;
};
_Static_assert(sizeof(struct reader_row) == 256, "layout");

#define POOL_READERS_AT                                                                          \
    (POOL_HEADER_BYTES + POOL_MAX_SLOTS * sizeof(struct slot_row) +                              \
     POOL_MAX_RANKS * sizeof(struct rank_row))
#define POOL_TABLES_BYTES (POOL_READERS_AT + POOL_MAX_READERS * sizeof(struct reader_row))

/* Lock bytes of the file; they hold no content.
 *
 * SLOT     shared: a process that copies out of the slot or views it; exclusive: the publisher
 * WRITER   exclusive: the process of the rank; rank 0 is the publisher
 * READER   exclusive: the process of the reader's row
 * PIECE    exclusive: a rank that writes into the slot, also after its publisher's death */
#define POOL_LOCK_BASE (INT64_C(1) << 61)
#define POOL_LOCK_SLOT POOL_LOCK_BASE
#define POOL_LOCK_WRITER (POOL_LOCK_BASE + 64)
#define POOL_LOCK_READER (POOL_LOCK_BASE + 256)
#define POOL_LOCK_PIECE (POOL_LOCK_BASE + 1024)

static inline int64_t pool_lock_slot(uint32_t slot) {
    return POOL_LOCK_SLOT + slot;
}
static inline int64_t pool_lock_writer(uint32_t rank) {
    return POOL_LOCK_WRITER + rank;
}
static inline int64_t pool_lock_reader(uint32_t row) {
    return POOL_LOCK_READER + row;
}
static inline int64_t pool_lock_piece(uint32_t slot, uint32_t rank) {
    return POOL_LOCK_PIECE + (int64_t)slot * POOL_MAX_RANKS + rank;
}

static inline uint64_t pool_word(uint64_t sequence, uint32_t slot) {
    return sequence << 8 | (slot + 1u);
}
static inline uint64_t pool_word_sequence(uint64_t word) {
    return word >> 8;
}
/* The slot in a word; UINT32_MAX, an invalid slot, without a version. */
static inline uint32_t pool_word_slot(uint64_t word) {
    return (uint32_t)(word & 0xFFu) - 1u;
}
static inline uint64_t pool_align_up(uint64_t value, uint64_t to) {
    return (value + to - 1) / to * to;
}
