/* Every byte that processes share: structs and constants.
 *
 * LAYOUT.md says the same in prose, with the ordering argument and a worked hex dump; golden bytes
 * (tests/golden/) pin the offsets.
 * Rules: fixed-width types only, no pointers, no size_t; a field that two processes touch
 * concurrently is _Atomic; an offset or a size that moves needs a new SHMBUS_LAYOUT_VERSION.
 *
 * Segment:  | bus_header | producer_slot[max_producers + 1] | extent_desc[extent_count]
 *           | intent log (u64[SHMBUS_MAX_GROUP_SIZE]) | retry_entry[SHMBUS_RETRY_ENTRIES]
 *           | split_entry[SHMBUS_MAX_SPLITS] | cancelled (u64[SHMBUS_CANCELLED])
 *           | declared_part | delivery_figures | wait_row[max_producers + 1]
 *           | lead_table | relay_journal | request lane
 *           | pad to a page | extents ... |
 * The last slot belongs to the collector: the lane into which it moves stragglers.
 */
#pragma once

#include <math.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bell.h"
#include "layout_figures.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the segment is little-endian; this machine is not"
#endif

#define SHMBUS_MAGIC UINT64_C(0x3153554253484D42) /* "BMHSBUS1" */
#define SHMBUS_LAYOUT_VERSION 10u

/* Records start on cache lines: two records never share a line. */
#define SHMBUS_RECORD_ALIGN 64u
#define SHMBUS_PAGE 4096u

/* The round of a record without a round. */
#define SHMBUS_NO_ROUND INT64_MIN

/* Limits stated in a record's header. */
#define SHMBUS_MAX_ID_BYTES 255u
#define SHMBUS_MAX_FIELDS 64u
/* The field of a multi-row sample, int64 [rows, 2]: for every row, its number of elements in the
 * following fields, and the length of their shared prefix. */
#define SHMBUS_ROW_LENGTHS "row_lengths"
/* Name prefix of a field stored only in a group's first sample, for the whole group. */
#define SHMBUS_SHARED_PREFIX "shared:"
#define SHMBUS_MAX_NDIM 32u
#define SHMBUS_MAX_NAME_BYTES 255u
#define SHMBUS_MAX_DTYPE_BYTES 1024u
/* Words of the shape table: one offset and ndim sizes for every field. */
#define SHMBUS_MAX_SHAPE_WORDS 1024u
#define SHMBUS_MAX_SCHEMA_BYTES 32768u
/* The intent log bounds the largest group: it makes an acknowledgement atomic. */
#define SHMBUS_MAX_GROUP_SIZE 16384u
#define SHMBUS_MAX_PRODUCERS 4096u
#define SHMBUS_MAX_EXTENTS 65536u
#define SHMBUS_LABEL_BYTES 48u
/* Random bits, enough to prevent collisions between buses of different nodes and times. */
#define SHMBUS_IDENTITY_BYTES 16u
/* Ancestor buses of a restored bus's records, from snapshot to snapshot. An ancestor stays until
 * the trainer has used its records: one restore, or as many as a trainer stays away for. */
#define SHMBUS_ANCESTORS 16u
#define SHMBUS_PAUSE_REASON_BYTES 120u
/* A declared schema as text and sizes: 64 fields of 40 bytes of name and dtype and 8 dimensions
 * take 7 KiB. */
#ifndef SHMBUS_DECLARED_BYTES /* small segments in the explorer */
#define SHMBUS_DECLARED_BYTES 16376u
#endif
/* Names of dimensions in one declared schema. */
#define SHMBUS_MAX_DIMENSION_NAMES 64u

/* Why records left the bus. Index into bus_header.released. */
enum shmbus_reason {
    SHMBUS_ACKED = 0,
    SHMBUS_DROP_DUPLICATE = 1,
    SHMBUS_DROP_SIZE_MISMATCH = 2,
    SHMBUS_DROP_SURPLUS = 3,
    SHMBUS_DROP_TIMEOUT = 4,
    SHMBUS_DROP_STALE = 5,
    SHMBUS_DROP_ZERO_VARIANCE = 6,
    SHMBUS_DROP_OVERFLOW = 7,
    SHMBUS_DROP_MALFORMED = 8,
    SHMBUS_DROP_CORRUPT = 9,
    SHMBUS_DROP_FAILED = 10,
    SHMBUS_DROP_FILTERED = 11,
    SHMBUS_RELAYED = 12, /* moved to another bus, with unknown outcome */
    SHMBUS_REASONS = 13,
};

/* Producer admission: producers wait during a pause, and for ever after a removal. */
enum shmbus_pause { SHMBUS_RUNS = 0, SHMBUS_PAUSED = 1, SHMBUS_REMOVED = 2 };

/* Offset  Size  Field            Written by   Read by     Order
 *      0     8  magic            creator      anyone      release / acquire, stored last
 *      8     4  layout_version   creator      anyone      before magic
 *     12     4  layout_hash      creator      anyone      before magic
 *     16    40  geometry         creator      anyone      before magic; geometry_crc covers 8..56
 *     56     4  geometry_crc     creator      anyone      before magic
 *    128     4  bell             reader, producers        seq_cst: 1 while the reader sleeps
 *    192     4  space_bell       reader       producers   futex word, bumped when space is freed
 *    196     4  space_wanted     producers, reader        seq_cst: 1 while a process waits
 *    200     8  jumbo_until_ns   producers    producers   advisory; CLOCK_MONOTONIC
 *    256     8  next_producer_id producers                fetch_add
 *    264     4  attach_epoch     producers    reader      release / acquire
 *    268     4  look_slot        looker       looker      relaxed: first slot of the next look
 *    272     8  next_look_ns     looker       workers     CAS: earliest next look for deaths
 *    280    16  stall_told_ns[]  waiters      waiters     CAS: last report by a worker, by a trainer
 *    320     8  policy_version   trainer      producers   relaxed
 *    328     4  consumer_packs   reader      producers   relaxed: 1 once the consumer packs batches
 *    332     4  leased_in_part   reader      reader      relaxed: 1 after the first SHMBUS_LEASED
 *    384   ...  collector        reader       anyone      relaxed, for messages only
 *    512   104  released[]       reader       anyone      relaxed; exact through the intent
 *    640    60  intents          reader       reader      counts, move_from: release / acquire
 *    704     4  paused           anybody      producers   release / acquire: enum shmbus_pause
 *    708     4  lent             reader       reader      relaxed: 1 once view locks may be held
 *    712   136  pause            anybody      producers   before paused; for messages only
 *    896     4  retries_open     collector    producers   relaxed: open retry requests; a hint
 *    904     8  groups_failed    collector    anyone      relaxed: given up, for messages only
 *    912     8  next_round       producers    producers   fetch_add: unique numbers
 *    920     8  cancelled_count  collector    producers   release / acquire: entries ever written
 *    928    16  identity         creator      anyone      before magic: random, unique to the bus
 *    944   384  ancestors        restorer     anyone      before the bus's naming; oldest first
 */
struct bus_ancestor {
    uint8_t identity[SHMBUS_IDENTITY_BYTES]; /* of a bus restored from its snapshot into this bus */
    uint64_t producers; /* exclusive bound of its ids, from the previous bound on; 0: unused */
};

struct bus_header {
    _Atomic uint64_t magic;
    uint32_t layout_version;
    uint32_t layout_hash;
    uint64_t segment_bytes;
    uint64_t data_offset;
    uint64_t extent_bytes;
    uint32_t extent_count;
    uint32_t max_producers;
    uint64_t created_unix_ns;
    uint32_t geometry_crc;
    uint32_t reserved0;

    alignas(128) _Atomic uint32_t bell;
    alignas(64) struct bell space_bell;
    _Atomic uint64_t jumbo_until_ns;
    alignas(64) _Atomic uint64_t next_producer_id;
    _Atomic uint32_t attach_epoch;
    _Atomic uint32_t look_slot;
    _Atomic uint64_t next_look_ns; /* CLOCK_MONOTONIC, as the next two */
    _Atomic uint64_t stall_told_ns[2];
    alignas(64) _Atomic int64_t policy_version;
    _Atomic uint32_t consumer_packs;
    _Atomic uint32_t leased_in_part;

    alignas(64) _Atomic uint32_t collector_pid;
    _Atomic uint32_t collector_leased_groups;
    _Atomic uint64_t collector_leased_records;
    _Atomic uint64_t collector_stashed_groups;
    _Atomic uint64_t collector_stashed_records;
    _Atomic uint64_t collector_seen_ns; /* CLOCK_MONOTONIC of the last poll */
    _Atomic uint64_t collector_lease_ns; /* CLOCK_MONOTONIC of the oldest lease */
    char collector_label[SHMBUS_LABEL_BYTES];

    alignas(64) _Atomic uint64_t released[SHMBUS_REASONS];

    /* The intent: the records of one acknowledgement, in force while count != 0.
     * base holds the earlier released[reason]: a replay counts no record twice. */
    alignas(64) _Atomic uint32_t intent_count;
    uint32_t intent_reason;
    uint64_t intent_base;
    uint32_t intent_crc;
    /* Extents of a run being freed, from free_first on. The log holds the words from which they are
     * freed; a single extent needs no intent. */
    _Atomic uint32_t free_span;
    uint32_t free_first;
    /* A straggler's move: move_from packs the first copy's place, + 1, in force while nonzero;
     * move_to packs the second copy's place. */
    uint32_t move_generation;
    _Atomic uint64_t move_from;
    uint64_t move_to;
    /* intent_base for the split's counter; SHMBUS_MAX_SPLITS if the records lack a split. */
    uint64_t intent_split_base;
    uint32_t intent_split;

    alignas(64) _Atomic uint32_t paused;
    _Atomic uint32_t lent;
    _Atomic int64_t pause_policy_version; /* the policy version when the pause began */
    _Atomic uint64_t pause_unix_ns;       /* start of the pause */
    char pause_reason[SHMBUS_PAUSE_REASON_BYTES];

    alignas(64) _Atomic uint32_t retries_open;
    _Atomic uint64_t groups_failed;
    _Atomic uint64_t next_round;
    _Atomic uint64_t cancelled_count;
    alignas(16) uint8_t identity[SHMBUS_IDENTITY_BYTES];
    struct bus_ancestor ancestors[SHMBUS_ANCESTORS];
};

#define SHMBUS_HEADER_BYTES 1536u
_Static_assert(sizeof(struct bus_header) <= SHMBUS_HEADER_BYTES, "the header has its place");
_Static_assert(offsetof(struct bus_header, released) == 512, "layout");
_Static_assert(offsetof(struct bus_header, move_from) == 672, "layout");
_Static_assert(offsetof(struct bus_header, lent) == 708, "layout");
_Static_assert(sizeof(struct bus_ancestor) == 24, "layout");

/* The holder of the file lock on byte SHMBUS_LOCK_SLOT + index of the segment owns the slot; the
 * kernel drops the lock when the owner dies, in whatever pid namespace. */
enum shmbus_slot_state { SHMBUS_SLOT_FREE = 0, SHMBUS_SLOT_ACTIVE = 1, SHMBUS_SLOT_CLOSED = 2 };

/* A link names an extent with its generation, hence never a later lease of the same extent:
 * generation << 32 | index + 1. Low half 0: no link yet; LINK_END: never a link. */
#define SHMBUS_LINK_END 0xFFFFFFFFu

/* The intent of a commit occupies its own lines: a polling reader takes the counters' line from
 * its owner again and again, and only the last store of a commit waits for the counters' line.
 *
 * Offset  Size  Field        Written by  Read by  Order
 *      0     8  committed    owner       reader   release / acquire: commits of every owner so far
 *      8     8  aborted      owner       reader   release / acquire
 *     16     8  first        owner       reader   release / acquire: link that starts a chain
 *     24     8  current      owner, freer reader   release / acquire: link to the chain's last
 *     32     8  next_order   owner       reader   release / acquire
 *     40     8  producer_id  owner       reader   release / acquire
 *     48     4  state        owner       reader   release / acquire
 *     52     4  pid          owner       anyone   for messages
 *     56    48  label        owner       anyone   for messages
 *    128     8  committing   owner       successor  committed + 1 during a commit
 *    136     8  commit_ref   owner       successor  the record of the commit
 *    144     4  commit_generation        successor  of the record's extent
 */
struct producer_slot {
    alignas(128) _Atomic uint64_t committed;
    _Atomic uint64_t aborted;
    _Atomic uint64_t first;
    _Atomic uint64_t current;
    _Atomic uint64_t next_order;
    _Atomic uint64_t producer_id;
    _Atomic uint32_t state;
    _Atomic uint32_t pid;
    char label[SHMBUS_LABEL_BYTES];
    /* The hardware fetches lines in pairs. */
    alignas(128) _Atomic uint64_t committing;
    _Atomic uint64_t commit_ref;
    _Atomic uint32_t commit_generation;
};
_Static_assert(sizeof(struct producer_slot) == 256, "two pairs of cache lines a slot");

/* The lease of an extent, or of a run: the first extent states the span, the rest state no span. A
 * span counts only with the generation of its lease: freeing an extent needs no wipe.
 *
 * Offset  Size  Field        Written by        Read by  Order
 *      0     8  word         leaser, freer     anyone   CAS: generation << 32 | slot + 1;
 *                                                       low half 0 is free
 *      8     8  order        leaser            reader   place in the lane, growing
 *     16     8  used         owner             reader   release / acquire: bytes exposed
 *     24     8  next         owner, freer      reader   CAS: link to the next run
 *     32     8  span         leaser            reader   release / acquire:
 *                                                       generation << 32 | extents
 *     40     4  sealed       owner             reader   release / acquire: used is final
 *     44     4  writer_pins  owner             reader   writable views outliving their commit
 *     48     8  producer_id  leaser            reader
 */
struct extent_desc {
    alignas(64) _Atomic uint64_t word;
    _Atomic uint64_t order;
    _Atomic uint64_t used;
    _Atomic uint64_t next;
    _Atomic uint64_t span;
    _Atomic uint32_t sealed;
    _Atomic uint32_t writer_pins;
    _Atomic uint64_t producer_id;
};
_Static_assert(sizeof(struct extent_desc) == 64, "a cache line a descriptor");

#include "ring/layout_tables.h"

/* State values are spread over the word: scribbled bytes seldom form a valid state. */
enum shmbus_record_state {
    SHMBUS_RESERVED = 0x52534552, /* "RESR" */
    SHMBUS_COMMITTED = 0x544D4F43, /* "COMT" */
    SHMBUS_ABORTED = 0x54524241, /* "ABRT" */
    SHMBUS_RELEASED = 0x454C4552, /* "RELE" */
};

/* The state of a committed record leased in a partial group. The first three bits differ from the
 * bits of every other state; the next 14 hold the number of members less 1; the last 15 hash the
 * first member. Members of one group share the state, to let the next collector form the same
 * group. */
#define SHMBUS_LEASED 0xA0000000u
#define SHMBUS_LEASED_MASK 0xE0000000u
#define SHMBUS_LEASED_HASH_BITS 15
_Static_assert(((SHMBUS_RESERVED | SHMBUS_COMMITTED | SHMBUS_ABORTED | SHMBUS_RELEASED) &
                SHMBUS_LEASED) == 0,
               "no flipped bit, nor two, makes a leased record of another");

static inline bool shmbus_is_leased(uint32_t state) {
    return (state & SHMBUS_LEASED_MASK) == SHMBUS_LEASED;
}

static inline bool shmbus_is_committed(uint32_t state) {
    return state == SHMBUS_COMMITTED || shmbus_is_leased(state);
}

static inline uint32_t shmbus_leased_members(uint32_t state) {
    return ((state & ~SHMBUS_LEASED_MASK) >> SHMBUS_LEASED_HASH_BITS) + 1;
}

/* For a group of 1 to SHMBUS_MAX_GROUP_SIZE members, with the first member's identity. */
static inline uint32_t shmbus_leased_state(uint32_t members, uint64_t producer_id,
                                           uint64_t sequence) {
    uint64_t mixed = (producer_id * UINT64_C(0x9E3779B97F4A7C15) ^ sequence) *
                     UINT64_C(0xD1B54A32D192ED03);
    return SHMBUS_LEASED | (members - 1) << SHMBUS_LEASED_HASH_BITS |
           (uint32_t)(mixed >> (64 - SHMBUS_LEASED_HASH_BITS));
}

#define SHMBUS_FLAG_PAYLOAD_CRC 1u /* payload_crc covers meta and payload */
#define SHMBUS_FLAG_MOVED 2u       /* straggler copied by the collector */
/* Failed sample: no fields; meta holds the reason, and score counts the earlier attempts. */
#define SHMBUS_FLAG_FAILED 4u
/* For a failure in a group of unknown size: group_size merely exceeds index. */
#define SHMBUS_FLAG_NO_SIZE 8u
/* The score of a record without a score from its producer: the reader supplies the score. */
#define SHMBUS_UNSCORED ((double)NAN)
/* Flags kept in a snapshot, and back into a bus. */
#define SHMBUS_FLAGS_KEPT (SHMBUS_FLAG_PAYLOAD_CRC | SHMBUS_FLAG_FAILED | SHMBUS_FLAG_NO_SIZE)

/* Record: header | shape (u64: offset, sizes... a field) | id | schema | meta | pad | payload.
 * The frame (8..32), under frame_crc, precedes the store of `used` that exposes the record. The
 * rest, under header_crc with shape, id and schema, precedes the state COMMITTED.
 *
 * Offset  Size  Field            Offset  Size  Field
 *      0     4  state                64     2  group_size
 *      4     4  frame_crc            66     2  need
 *      8     8  record_bytes         68     2  index
 *     16     8  producer_id          70     2  split
 *     24     4  slot                 72     8  round
 *     28     4  flags                80     8  committed_ns
 *     32     8  sequence             88     4  meta_bytes
 *     40     8  lane_number          92     4  meta_offset
 *     48     8  policy_version       96     2  id_bytes
 *     56     8  score                98     2  field_count
 *                                   100     4  shape_words
 *                                   104     4  schema_bytes
 *                                   108     4  payload_crc
 *                                   112     8  payload_bytes
 *                                   120     4  version_span
 *                                   124     4  header_crc, over 8..124 and the bytes after
 *
 * A group completes with `need` of its group_size indices. policy_version and policy_version +
 * version_span bound the versions that sampled the record. `split` holds a label's number.
 */
struct record_header {
    alignas(64) _Atomic uint32_t state;
    uint32_t frame_crc;
    uint64_t record_bytes;
    uint64_t producer_id;
    uint32_t slot;
    uint32_t flags;
    uint64_t sequence;
    uint64_t lane_number;
    int64_t policy_version;
    double score;
    uint16_t group_size;
    uint16_t need; /* 1 to group_size */
    uint16_t index;
    uint16_t split;
    int64_t round;
    uint64_t committed_ns;
    uint32_t meta_bytes;
    uint32_t meta_offset;
    uint16_t id_bytes;
    uint16_t field_count;
    uint32_t shape_words;
    uint32_t schema_bytes;
    uint32_t payload_crc;
    uint64_t payload_bytes;
    uint32_t version_span;
    uint32_t header_crc;
};
_Static_assert(sizeof(struct record_header) == 128, "two cache lines");
_Static_assert(SHMBUS_MAX_GROUP_SIZE <= UINT16_MAX, "a record says its group's size in two bytes");
_Static_assert(SHMBUS_MAX_GROUP_SIZE - 1 <= ~SHMBUS_LEASED_MASK >> SHMBUS_LEASED_HASH_BITS,
               "a leased state has room for the members of any group");
_Static_assert(offsetof(struct record_header, committed_ns) == 80, "layout");
_Static_assert(offsetof(struct record_header, header_crc) == 124, "layout");

/* Schema: field_count entries back to back without padding. The itemsize lets a reader check bounds
 * without knowledge of the dtype. */
struct schema_entry {
    uint16_t name_bytes;
    uint16_t dtype_bytes;
    uint32_t itemsize;
    uint8_t ndim;
    uint8_t reserved[3];
    /* name, dtype */
};
_Static_assert(sizeof(struct schema_entry) == 12, "layout");

/* The schema from the bus's creation; 0 bytes without a schema.
 *
 * Offset  Size  Field  Written by  Read by    Order
 *      0     4  bytes  creator     producers  before magic
 *      4     4  crc    creator     producers  before magic; over the bytes
 *      8   ...  text   creator     producers  before magic: declared_head, names of dimensions (a
 *                                             length byte before every name), declared_entry's
 */
struct declared_part {
    alignas(8) uint32_t bytes;
    uint32_t crc;
    uint8_t text[SHMBUS_DECLARED_BYTES];
};
_Static_assert(sizeof(struct declared_part) == 8 + SHMBUS_DECLARED_BYTES, "layout");

struct declared_head {
    uint16_t field_count;
    uint16_t dimension_names;
};
_Static_assert(sizeof(struct declared_head) == 4, "layout");

#define SHMBUS_DECLARED_OPTIONAL 1u  /* a record may lack the field */
#define SHMBUS_DECLARED_ANY_SHAPE 2u /* any number of dimensions; ndim 0 */
/* Size of a declared field's dimension, or a special value; name k equals DIMENSION_NAMED - k. */
#define SHMBUS_DIMENSION_FREE INT64_C(-1)
#define SHMBUS_DIMENSION_NAMED INT64_C(-2)
struct declared_entry {
    uint16_t name_bytes;
    uint16_t dtype_bytes;
    uint32_t itemsize;
    uint8_t ndim;
    uint8_t flags;
    uint8_t reserved[2];
    /* name, dtype, i64 a dimension; without padding */
};
_Static_assert(sizeof(struct declared_entry) == 12, "layout");

/* File locks (open file description locks) on the segment: byte offsets beyond its end. Every
 * process with the segment open shares USERS; exclusive USERS proves the absence of other users. */
#define SHMBUS_LOCK_BASE (INT64_C(1) << 60)
#define SHMBUS_LOCK_COLLECTOR (SHMBUS_LOCK_BASE + 0)
#define SHMBUS_LOCK_USERS (SHMBUS_LOCK_BASE + 1)
/* For a feeder, or for the repair after a dead feeder: held for moments. */
#define SHMBUS_LOCK_FEEDER (SHMBUS_LOCK_BASE + 2)
#define SHMBUS_LOCK_RELAY (SHMBUS_LOCK_BASE + 3) /* for a relay that writes records of other
                                                  * buses */
#define SHMBUS_LOCK_SLOT (SHMBUS_LOCK_BASE + 1024)
/* Shared locks of processes that lease groups from a daemon: the locks survive the daemon and die
 * with the client. View lock, one byte an extent: an array of a client looks into the run, which
 * delays the free. */
#define SHMBUS_LOCK_VIEW (SHMBUS_LOCK_BASE + (INT64_C(1) << 20))
/* Lease lock, one byte an extent and client: the client holds unfinished groups in the extent. */
#define SHMBUS_LOCK_LEASE (SHMBUS_LOCK_BASE + (INT64_C(1) << 32))
#define SHMBUS_MAX_CLIENTS 1024u
_Static_assert(SHMBUS_LOCK_SLOT + SHMBUS_MAX_PRODUCERS <= SHMBUS_LOCK_VIEW &&
                   SHMBUS_LOCK_VIEW + SHMBUS_MAX_EXTENTS <= SHMBUS_LOCK_LEASE,
               "no byte is the lock of two things");

/* Rejects segments of a different struct layout, whatever the cause. */
#define SHMBUS_LAYOUT_HASH                                                                    \
    ((uint32_t)(SHMBUS_LAYOUT_VERSION * 2654435761u ^                                         \
                (uint32_t)(sizeof(struct bus_header) * 40503u +                               \
                           sizeof(struct producer_slot) * 2741u +                             \
                           sizeof(struct extent_desc) * 577u +                                \
                           sizeof(struct record_header) * 97u +                               \
                           sizeof(struct retry_entry) * 31u * SHMBUS_RETRY_ENTRIES +           \
                           sizeof(struct split_entry) * 17u * SHMBUS_MAX_SPLITS +             \
                           SHMBUS_CANCELLED * 8u +                                            \
                           sizeof(struct delivery_figures) * 11u +                             \
                           sizeof(struct wait_row) * 19u +                                     \
                           (sizeof(struct lead_table) + SHMBUS_LEAD_ROWS) * 13u +             \
                           (sizeof(struct request_lane) + sizeof(struct request_row) +        \
                            sizeof(struct request_cell)) * 7u +                                \
                           sizeof(struct declared_part) * 11u +                                \
                           sizeof(struct relay_journal) * 3u +                                 \
                           sizeof(struct relay_entry) * 19u + SHMBUS_REASONS * 23u +           \
                           SHMBUS_IDENTITY_BYTES * 5u +                                        \
                           SHMBUS_MAX_GROUP_SIZE)))

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "atomics between processes must be lock-free");

static inline uint64_t shmbus_align_up(uint64_t value, uint64_t to) {
    return (value + to - 1) / to * to;
}
