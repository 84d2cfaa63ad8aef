/* A block: records of one bus as bytes for another bus, copied whole or not at all.
 *
 * A record's image holds its bytes from the ring in canonical form: ring-local values (state, frame
 * checksum, slot, number in the lane) are 0, and only the lasting flags remain.
 *
 * Invariants:
 *  - Every use of block bytes follows a proof of the block's checksum and of the record's bounds.
 *  - Checks read the caller's own copy of a record's head, and the writer writes this copy. A block
 *    that changes meanwhile (memory of another process) can tear only a payload.
 *  - A block names its source bus, and every record keeps its numbers from the source bus. */
#pragma once

#include "record.h"

#define BLOCK_MAGIC UINT64_C(0x314B4C4253484D42) /* "BMHSBLK1" */
#define BLOCK_VERSION 1u
/* Most records of a block: the bound of one release. */
#define BLOCK_MAX_RECORDS SHMBUS_MAX_GROUP_SIZE

/* Offset  Size  Field
 *      0     8  magic
 *      8     4  version          of the block
 *     12     4  layout_version   of its records
 *     16     8  bytes            of the whole block, including this header
 *     24     4  count            of records
 *     28     4  reserved         0
 *     32    16  identity         of the source bus
 *     48     8  reserved         0
 *     56     4  records_crc      CRC-32C over the bytes after the header
 *     60     4  header_crc       over 0..60
 *
 * Records follow back to back, record_bytes each. */
struct block_header {
    uint64_t magic;
    uint32_t version;
    uint32_t layout_version;
    uint64_t bytes;
    uint32_t count;
    uint32_t reserved0;
    uint8_t identity[SHMBUS_IDENTITY_BYTES];
    uint64_t reserved1;
    uint32_t records_crc;
    uint32_t header_crc;
};
_Static_assert(sizeof(struct block_header) == 64, "records begin aligned");
_Static_assert(offsetof(struct block_header, identity) == 32, "layout");
_Static_assert(offsetof(struct block_header, header_crc) == 60, "layout");

/* ---- making one ---- */

struct block_maker {
    uint8_t *block;
    uint64_t room, used;
    uint32_t count, crc;
};

/* False without room for a header. */
bool block_begin(struct block_maker *self, void *into, uint64_t room);
/* Adds a record of the ring; false without room, or if the record's numbers do not fit. */
bool block_add(struct block_maker *self, const void *record, uint64_t bytes);
/* The bytes of the whole block. */
uint64_t block_end(struct block_maker *self, const uint8_t identity[SHMBUS_IDENTITY_BYTES]);

/* The checksum of a record's canonical head; false if the record's numbers do not fit. */
bool block_head_check(const void *record, uint64_t bytes, uint32_t *check);

/* ---- reading one ---- */

enum block_fault {
    BLOCK_OK = 0,
    BLOCK_NOT_ONE,       /* no magic */
    BLOCK_OTHER_VERSION, /* got: the version */
    BLOCK_OTHER_LAYOUT,
    BLOCK_CUT,         /* size and stated size differ */
    BLOCK_DAMAGED,     /* wrong checksum */
    BLOCK_BAD_LENGTH,  /* record larger than the rest, or bytes after the last record */
    BLOCK_BAD_RECORD,  /* contradictory numbers in a record */
    BLOCK_BAD_PAYLOAD, /* wrong producer's checksum of a payload */
    BLOCK_TWO_FIELDS,  /* with equal names */
    BLOCK_OTHER_SPLIT, /* got: a split without a number at the reader */
};

struct block_report {
    enum block_fault fault;
    uint32_t record; /* index, for errors of a record */
    uint64_t expected, got;
};

/* Steps through the records of a block after block_open or block_reopen. */
struct block_cursor {
    const uint8_t *at, *end;
    uint32_t next, count;
    /* Split numbers of the block's bus mapped to the reader's; initially only "train". */
    const uint8_t *splits;
    uint32_t split_count;
};

/* Proves the block's header and checksum, and puts the cursor before the first record. */
bool block_open(const void *block, uint64_t bytes, struct block_header *header,
                struct block_cursor *cursor, struct block_report *report);
/* Reopens an already verified block, without the checksum over the records. */
bool block_reopen(const void *block, uint64_t bytes, struct block_cursor *cursor);
/* The next record's checked head, and its image; NULL at the end, or with a fault. */
const uint8_t *block_next(struct block_cursor *cursor, struct record_copy *copy,
                          struct block_report *report);
/* Steps over a record; false at the block's end. */
bool block_skip(struct block_cursor *cursor);

/* A record that block_next gave, into room in a lane; neither closed nor exposed. */
void block_write(struct record_header *to, const struct record_place *place,
                 const struct record_copy *copy, const uint8_t *image, uint64_t producer_id,
                 uint32_t slot, uint32_t more_flags);
