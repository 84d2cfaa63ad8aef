/* The bytes shared by the two processes of a channel: structs and lock bytes. LAYOUT.md of this
 * folder has the offsets, the writers, and the ordering argument.
 *
 * A channel is a queue of at most `slots` steps from one sender to one receiver, in order and
 * acknowledged. Message m occupies slot m % slots and carries step `step_base + m`.
 *
 * File:  | channel_header | channel_side[2] | channel_row[CHANNEL_MAX_SLOTS] | pad
 *        | channel_statement[2] | pad | slot 0 | slot 1 | ... |
 * Slot:  | payload | pad to 64 | meta |, with as much memory as its largest message took so far
 * Rules: fixed-width types only, no pointers; a field touched concurrently by two processes is
 * _Atomic; an offset or a size that moves needs a new CHANNEL_LAYOUT_VERSION. */
#pragma once

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bell.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the channel is little-endian; this machine is not"
#endif

#define CHANNEL_MAGIC UINT64_C(0x314E484350424853) /* "SHBPCHN1" */
#define CHANNEL_LAYOUT_VERSION 1u
#define CHANNEL_PAGE 4096u
/* More than eight steps in flight merely hide a slow receiver. */
#define CHANNEL_MAX_SLOTS 8u
#define CHANNEL_MAX_BYTES (UINT64_C(1) << 44)
/* A message's metadata: a table of tensors, and the user's additions. */
#define CHANNEL_MAX_META_BYTES (UINT64_C(16) << 20)
#define CHANNEL_META_ALIGN 64u
#define CHANNEL_LABEL_BYTES 48u
#define CHANNEL_REASON_BYTES 160u
/* A side's statement: names, dtypes and shapes of some hundred tensors. */
#ifndef CHANNEL_STATEMENT_BYTES /* small segments in the explorer */
#define CHANNEL_STATEMENT_BYTES 65520u
#endif

/* Invariant: acked <= sent <= acked + slots. */
struct channel_header {
    _Atomic uint64_t magic;
    uint32_t layout_version;
    uint32_t slots;
    uint64_t file_bytes;
    uint64_t slots_offset;
    uint64_t slot_stride;
    uint64_t max_bytes; /* of payload and meta together */
    uint64_t created_unix_ns;
    uint32_t geometry_crc;
    uint32_t reserved0;

    alignas(128) _Atomic uint64_t sent;
    _Atomic int64_t step_base;
    _Atomic uint64_t growths;
    alignas(128) _Atomic uint64_t acked;
    alignas(64) struct bell sent_bell;
    alignas(64) struct bell acked_bell;
};
#define CHANNEL_HEADER_BYTES 512u
#define CHANNEL_GEOMETRY_TO 56u
_Static_assert(sizeof(struct channel_header) == CHANNEL_HEADER_BYTES, "layout");
_Static_assert(offsetof(struct channel_header, geometry_crc) == CHANNEL_GEOMETRY_TO, "layout");
_Static_assert(offsetof(struct channel_header, sent_bell) == 320, "layout");
_Static_assert(offsetof(struct channel_header, acked_bell) == 384, "layout");

enum channel_side_name { CHANNEL_SENDER = 0, CHANNEL_RECEIVER = 1, CHANNEL_SIDES = 2 };
enum channel_side_state { CHANNEL_NEVER = 0, CHANNEL_OPEN = 1, CHANNEL_CLOSED = 2 };

/* The owner of a side: the holder of lock byte CHANNEL_LOCK_SIDE + side. `state` is stored last. */
struct channel_side {
    alignas(256) _Atomic uint32_t state;
    _Atomic uint32_t pid;
    _Atomic uint64_t claims;
    char label[CHANNEL_LABEL_BYTES];
    char reason[CHANNEL_REASON_BYTES]; /* of a close */
    uint8_t reserved0[32];
};
_Static_assert(sizeof(struct channel_side) == 256, "layout");
_Static_assert(offsetof(struct channel_side, label) == 16, "layout");
_Static_assert(offsetof(struct channel_side, reason) == 64, "layout");

enum channel_kind { CHANNEL_STEP = 1, CHANNEL_SKIP = 2, CHANNEL_FAIL = 3, CHANNEL_KINDS = 4 };

/* One message: written by the sender before `sent` covers the row, constant until `acked` does;
 * `room` belongs to the sender alone. */
struct channel_row {
    alignas(256) _Atomic uint64_t room;
    uint32_t crc;
    uint32_t kind;
    uint64_t sequence;
    int64_t step;
    uint64_t bytes; /* of payload */
    uint64_t meta_bytes;
    uint64_t sent_unix_ns;
    uint32_t meta_crc;
    uint32_t reserved0;
    char reason[CHANNEL_REASON_BYTES]; /* of a skip or a failure */
    uint8_t reserved1[32];
};
#define CHANNEL_ROW_CRC_FROM 12u
_Static_assert(sizeof(struct channel_row) == 256, "layout");
_Static_assert(offsetof(struct channel_row, kind) == CHANNEL_ROW_CRC_FROM, "layout");
_Static_assert(offsetof(struct channel_row, reason) == 64, "layout");

/* A side's statement about the tensors, in bytes read only by the layer above. The version is 0
 * before the first statement, odd during a write, and after a death in the middle. */
struct channel_statement {
    alignas(64) _Atomic uint64_t version;
    uint32_t bytes;
    uint32_t crc;
    uint8_t data[CHANNEL_STATEMENT_BYTES];
};
_Static_assert(sizeof(struct channel_statement) == 16 + CHANNEL_STATEMENT_BYTES, "layout");
_Static_assert(offsetof(struct channel_statement, data) == 16, "layout");

#define CHANNEL_SIDES_OFFSET CHANNEL_HEADER_BYTES
#define CHANNEL_ROWS_OFFSET (CHANNEL_SIDES_OFFSET + CHANNEL_SIDES * sizeof(struct channel_side))
#define CHANNEL_STATEMENTS_OFFSET 4096u
#define CHANNEL_TABLES_BYTES                                                                     \
    (CHANNEL_STATEMENTS_OFFSET + CHANNEL_SIDES * sizeof(struct channel_statement))
_Static_assert(CHANNEL_ROWS_OFFSET + CHANNEL_MAX_SLOTS * sizeof(struct channel_row) <=
                   CHANNEL_STATEMENTS_OFFSET,
               "the rows have their place");
_Static_assert(CHANNEL_TABLES_BYTES % CHANNEL_PAGE == 0, "slots begin at a page");

/* The byte of the file locked by a living side; it holds no content. */
#define CHANNEL_LOCK_SIDE (INT64_C(1) << 61)

static inline uint64_t channel_align_up(uint64_t value, uint64_t to) {
    return (value + to - 1) / to * to;
}
/* Offset of meta after `bytes` bytes of payload. */
static inline uint64_t channel_meta_at(uint64_t bytes) {
    return channel_align_up(bytes, CHANNEL_META_ALIGN);
}
