/* A block: records of one bus as bytes that can go to another one, whole or not at all.
 *
 * A record's image is what lies in the ring, in its canonical form: what only that ring knows of it
 * (state, frame checksum, slot, number in the lane) is 0, and its flags are those that it keeps.
 *
 * Invariants:
 *  - Nothing of a block is used before its checksum has been proved, and each record's bounds.
 *  - What is checked is the caller's own copy of a record's head, and that copy is what is written:
 *    a block that changes meanwhile, as memory of another process may, can only tear a payload.
 *  - A block names the bus that it came from, and each record has the numbers that it had there. */
#ifndef SHMBUS_RING_BLOCK_H
#define SHMBUS_RING_BLOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "record.h"

#define BLOCK_MAGIC UINT64_C(0x314B4C4253484D42) /* "BMHSBLK1" */
#define BLOCK_VERSION 1u
/* A block has at most so many records: what one release can end. */
#define BLOCK_MAX_RECORDS SHMBUS_MAX_GROUP_SIZE

/* Offset  Size  Field
 *      0     8  magic
 *      8     4  version          of the block
 *     12     4  layout_version   of its records
 *     16     8  bytes            of all of it, this header included
 *     24     4  count            of records
 *     28     4  reserved         0
 *     32    16  identity         of the bus that they came from
 *     48     8  reserved         0
 *     56     4  records_crc      CRC-32C over what follows the header
 *     60     4  header_crc       over 0..60
 *
 * Records follow, one behind the other, each of record_bytes. */
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
/* Adds a record of the ring; false without room, or where its numbers do not fit. */
bool block_add(struct block_maker *self, const void *record, uint64_t bytes);
/* The bytes of the whole block. */
uint64_t block_end(struct block_maker *self, const uint8_t identity[SHMBUS_IDENTITY_BYTES]);

/* The checksum of a record's canonical head; false where its numbers do not fit. */
bool block_head_check(const void *record, uint64_t bytes, uint32_t *check);

/* ---- reading one ---- */

enum block_fault {
    BLOCK_OK = 0,
    BLOCK_NOT_ONE,       /* no magic */
    BLOCK_OTHER_VERSION, /* got says which */
    BLOCK_OTHER_LAYOUT,
    BLOCK_CUT,         /* shorter or longer than it says */
    BLOCK_DAMAGED,     /* a checksum is wrong */
    BLOCK_BAD_LENGTH,  /* a record that does not fit what is left, or bytes behind the last one */
    BLOCK_BAD_RECORD,  /* a record whose numbers contradict each other */
    BLOCK_BAD_PAYLOAD, /* the producer's checksum of a payload is wrong */
    BLOCK_TWO_FIELDS,  /* of one name */
    BLOCK_OTHER_SPLIT, /* got: one that its reader has no number for */
};

struct block_report {
    enum block_fault fault;
    uint32_t record; /* which one, where it is a record's */
    uint64_t expected, got;
};

/* Steps through the records of a block whose header was read. */
struct block_cursor {
    const uint8_t *at, *end;
    uint32_t next, count;
    /* By the numbers of splits on the block's bus, those of its reader; at first of "train" alone. */
    const uint8_t *splits;
    uint32_t split_count;
};

/* Proves the block's header and checksum, and puts the cursor before the first record. */
bool block_open(const void *block, uint64_t bytes, struct block_header *header,
                struct block_cursor *cursor, struct block_report *report);
/* The same without the checksum over the records, for one that was proved before. */
bool block_reopen(const void *block, uint64_t bytes, struct block_cursor *cursor);
/* The next record's checked head, and its image; NULL at the end, or with a fault. */
const uint8_t *block_next(struct block_cursor *cursor, struct record_copy *copy,
                          struct block_report *report);
/* Steps over one; false where the block ends. */
bool block_skip(struct block_cursor *cursor);

/* A record that block_next gave, into room in a lane; neither closed nor exposed. */
void block_write(struct record_header *to, const struct record_place *place,
                 const struct record_copy *copy, const uint8_t *image, uint64_t producer_id,
                 uint32_t slot, uint32_t more_flags);

#endif
