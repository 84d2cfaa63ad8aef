/* The tables beside the ring, included by layout.h. */
#pragma once

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* ---- Splits, and groups that ended early. Included only by layout.h. */
/* Splits of a bus, for example "train": a label in its table for every split. Few enough for a
 * counter each. */
#define SHMBUS_MAX_SPLITS 16u
/* The default split of records: the training data. */
#define SHMBUS_SPLIT_TRAIN 0u
#define SHMBUS_SPLIT_TRAIN_LABEL "train"
/* Size of a split's label in UTF-8; with its length, the label fills four words. */
#define SHMBUS_SPLIT_LABEL_BYTES 31u
/* The last groups that ended early without every sample, for queries by their workers. */
#define SHMBUS_CANCELLED 1024u

/* A split: its label, and the ledger of its records. The first word of the label begins with the
 * length: a written word of the label never equals 0, and 0 means not written yet.
 *
 * Offset  Size  Field          Written by       Read by  Order
 *      0    32  label          first user       anyone   CAS from 0, word by word
 *     32     8  acked          collector        anyone   relaxed; exact through the intent
 *     40     8  dropped        collector        anyone   the same
 *     48     8  stashed        collector        anyone   relaxed, for messages only
 *     56     4  ready_groups   collector        anyone   the same
 *     60     4  open_groups    collector        anyone   the same
 */
#define SHMBUS_SPLIT_LABEL_WORDS 4u
struct split_entry {
    alignas(64) _Atomic uint64_t label[SHMBUS_SPLIT_LABEL_WORDS];
    _Atomic uint64_t acked;
    _Atomic uint64_t dropped;
    _Atomic uint64_t stashed;
    _Atomic uint32_t ready_groups;
    _Atomic uint32_t open_groups;
};
#define SHMBUS_SPLITS_BYTES ((uint64_t)SHMBUS_MAX_SPLITS * sizeof(struct split_entry))
_Static_assert(sizeof(struct split_entry) == 64, "a cache line a split");
_Static_assert(SHMBUS_SPLIT_LABEL_BYTES + 1 == SHMBUS_SPLIT_LABEL_WORDS * 8, "layout");

/* ---- Retry requests: single samples requested again from producers. Included only by layout.h. */
/* Open retry requests; more would not help a failing fleet. */
#define SHMBUS_RETRY_ENTRIES 128u
#define SHMBUS_RETRY_ID_BYTES 256u
#define SHMBUS_RETRY_REASON_BYTES 192u

/* A retry request. `claim` is FREE, BUSY while the collector changes the entry, or the claiming
 * producer's id + 1, with bit ANSWERED from just before the answer's commit on.
 *
 * Offset  Size  Field        Written by             Read by    Order
 *      0     8  claim        collector, producers   both       CAS; BUSY first, FREE last
 *      8     8  number       collector              producers  0 for no request
 *     16    40  ...          collector              producers  before claim
 *     60     4  crc          collector              producers  over 8..60 and 64..512
 */
#define SHMBUS_RETRY_FREE UINT64_C(0)
#define SHMBUS_RETRY_BUSY UINT64_MAX
#define SHMBUS_RETRY_ANSWERED (UINT64_C(1) << 63)
/* The `attempt` of the row that pauses the request lane and requests no sample. `reason` holds the
 * reason, `round` the start (CLOCK_REALTIME, ns), `id` stays empty. During a pause a worker must
 * claim this row before a sample; the collector publishes the row anew for every probe. */
#define SHMBUS_RETRY_PAUSE UINT32_MAX
struct retry_entry {
    alignas(64) _Atomic uint64_t claim;
    uint64_t number;
    int64_t round;
    uint64_t asked_ns; /* CLOCK_MONOTONIC */
    uint32_t group_size;
    uint32_t index;
    uint32_t attempt;
    uint16_t id_bytes;
    uint16_t reason_bytes;
    uint16_t need;
    uint16_t split;
    uint32_t late; /* 1: the sample missed its group's deadline; the first attempt may still run */
    uint32_t reserved0;
    uint32_t crc;
    char id[SHMBUS_RETRY_ID_BYTES];
    char reason[SHMBUS_RETRY_REASON_BYTES];
};
_Static_assert(sizeof(struct retry_entry) == 512, "layout");

/* ---- The admission table and the request lane, the last parts before the extents. For layout.h.
 *
 * The rules of layout.h hold. Both parts lie last: their sizes move nothing but the extents. */
/* Groups admitted and not delivered yet, on a bus with a bound: more than a step of every known
 * trainer, and a table scanned in microseconds. */
#define SHMBUS_LEAD_ROWS 4096u
/* The request lane's share of a bus, and its minimum: prompts are small beside trajectories. */
#define SHMBUS_REQUEST_SHARE 32u
#define SHMBUS_REQUEST_MIN_BYTES (UINT64_C(64) << 10)
#define SHMBUS_REQUEST_MAX_BYTES (UINT64_C(1) << 32)
/* Priorities; level 0 goes last. */
#define SHMBUS_REQUEST_LEVELS 8u
/* Division of the lane's bytes: bytes for a row, and samples for a row. A unit holds a part of a
 * prompt, a block of cells a part of a group. */
#define SHMBUS_REQUEST_ROW_SHARE 2048u
#define SHMBUS_REQUEST_MIN_ROWS 16u
#define SHMBUS_REQUEST_MAX_ROWS 16384u
#define SHMBUS_REQUEST_CELLS_A_ROW 16u
#define SHMBUS_REQUEST_CELLS_A_BLOCK 8u
#define SHMBUS_REQUEST_UNIT 64u
/* Rows that share a count of changes: a look at the open requests reads a count a chunk. */
#define SHMBUS_REQUEST_CHUNK 256u

/* Admitted groups (lead.h).
 *
 * Offset  Size  Field             Written by             Read by    Order
 *      0     4  limit             creator, collector     producers  relaxed; 0 for no bound
 *      4     8  max_groups, ...   creator                anyone     before magic
 *     16    32  version, ...      collector              collector  a bound in versions counts them
 *     64     8  rows[]            producers, collector   both       CAS
 */
struct lead_table {
    alignas(64) _Atomic uint32_t limit;
    uint32_t max_groups;   /* 0 for no bound in groups */
    uint32_t max_versions; /* bound in versions + 1, or 0 */
    uint32_t reserved0;
    int64_t version;       /* policy version of `ended_before` */
    uint64_t ended;        /* groups delivered and ended, since the bus's creation */
    uint64_t ended_before; /* `ended` at the start of the present version, with the groups trained
                            * by then */
    uint64_t a_version;    /* groups in the last version */
    uint64_t reserved1[2];
    _Atomic uint64_t rows[]; /* SHMBUS_LEAD_ROWS */
};
_Static_assert(offsetof(struct lead_table, rows) == 64, "layout");

/* The request lane (requests.h): request_lane | request_row[rows] | order (u32[levels][rows])
 * | request_cell[cells] | bits of cells' blocks (u64) | bits of units (u64) | units. The bytes
 * between the lead table and the extents determine every count.
 *
 * Offset  Size  Field          Written by          Read by    Order
 *      0     8  work           feeders, givers     workers    bell: an open sample may exist
 *      8     8  room           collector           feeders    bell: room may exist
 *     16     8  taken_ns       workers             anyone     relaxed; CLOCK_MONOTONIC, messages
 *     64     4  feeding        feeder              anyone     odd while a feeder changes rows
 *     68    12  ..._hint       feeder              feeder     start of the next search
 *     80     8  number         feeder              anyone     of the last request
 *     88     8  offered        feeder              anyone     samples, since the bus was created
 *     96     8  done           feeder              anyone     samples of freed rows
 *    104     8  given_up       feeder              anyone     the same
 *    112    24  freeing, ...   feeder              feeders    the row being freed
 *    192     4  returned       workers, reapers    workers    1 if a row may hold a returned sample
 *    256   ...  heads          workers             workers    begin of every priority's order
 *    384   ...  tails          feeder              workers    release / acquire: end of the order
 */
struct request_lane {
    alignas(64) struct bell work;
    struct bell room;
    _Atomic uint64_t taken_ns;
    alignas(64) _Atomic uint32_t feeding;
    uint32_t row_hint, block_hint, unit_hint;
    _Atomic uint64_t number;
    _Atomic uint64_t offered;
    _Atomic uint64_t done;
    _Atomic uint64_t given_up;
    _Atomic uint64_t freeing; /* row + 1, or 0 */
    uint64_t freeing_done;
    uint64_t freeing_given_up;
    alignas(64) _Atomic uint32_t returned;
    alignas(128) _Atomic uint64_t heads[SHMBUS_REQUEST_LEVELS];
    alignas(128) _Atomic uint64_t tails[SHMBUS_REQUEST_LEVELS];
};
_Static_assert(sizeof(struct request_lane) == 512, "layout");
_Static_assert(offsetof(struct request_lane, room) == 8, "layout");
_Static_assert(offsetof(struct request_lane, heads) == 256, "layout");
_Static_assert(offsetof(struct request_lane, tails) == 384, "layout");

/* One prompt's group. word is number << 2 | enum request_state.
 *
 * Offset  Size  Field        Written by           Read by    Order
 *      0     8  word         feeder, collector    anyone     release / acquire: OPEN stored last
 *      8    64  place, ...   feeder               anyone     before word; crc covers 8..68
 *     72     8  next         workers              workers    CAS: number (28) | lowest sample (32)
 *                                                            that may be new
 *     80     4  returned     workers, reapers     workers    1 if samples before `next` may be open
 *     84     4  admitted     workers              anyone     1 once a worker took a sample
 *     88     8  ended_...    collector            feeder     before word ENDED
 *     96    16  begun, done  feeder, collector    anyone     release / acquire: changes of OPEN in
 *                                                            the chunk of rows that begins here
 */
enum request_state { REQUEST_FREE = 0, REQUEST_BUSY = 1, REQUEST_OPEN = 2, REQUEST_ENDED = 3 };
struct request_row {
    alignas(64) _Atomic uint64_t word;
    uint64_t place; /* in its priority's order */
    int64_t round;
    uint64_t offered_ns; /* CLOCK_MONOTONIC */
    uint64_t offered;    /* total samples of the lane up to this row */
    uint32_t first_cell;
    uint32_t first_unit;
    uint32_t data_bytes; /* id and prompt, back to back */
    uint32_t data_crc;
    uint16_t group_size;
    uint16_t need;
    uint16_t id_bytes;
    uint16_t split; /* split of the records */
    uint16_t level;
    uint16_t reserved0;
    uint32_t crc;
    _Atomic uint64_t next;
    _Atomic uint32_t returned;
    _Atomic uint32_t admitted;
    uint32_t ended_done;
    uint32_t ended_given_up;
    _Atomic uint64_t begun;
    _Atomic uint64_t done;
    uint64_t reserved1[2];
};
_Static_assert(sizeof(struct request_row) == 128, "layout");
_Static_assert(offsetof(struct request_row, begun) == 96, "layout");

/* One sample of a group. claim: kind (2 bits, enum request_kind) | producer id (34, every bit 1 for
 * a sample made on another node) | number of the row (28). DONE with a producer: the producer
 * commits the answer. commit: number (28) | the lane's count after the answer's commit (36), stored
 * before the commit. From `commit`, the reaper of a dead worker knows if the answer is in the
 * ring. */
enum request_kind { CELL_NONE = 0, CELL_IS_OPEN = 1, CELL_IS_CLAIMED = 2, CELL_IS_DONE = 3 };
struct request_cell {
    _Atomic uint64_t claim;
    _Atomic uint64_t commit;
};
_Static_assert(sizeof(struct request_cell) == 16, "layout");

/* ---- The relay's journal, between the lead table and the request lane. For layout.h.
 *
 * The rules of layout.h hold. The journal lists the records of other buses that a relay writes to
 * this bus, and the written records that their sources may still hold (relay_journal.h). */
/* Bytes of the bus for one entry: a record of 500 tokens with their numbers. A bus with smaller
 * records holds at most one relayed record an entry. */
#define SHMBUS_RELAY_SHARE 8192u
#ifndef SHMBUS_RELAY_MIN_ENTRIES /* small segments in the explorer */
#define SHMBUS_RELAY_MIN_ENTRIES 64u
#endif
#define SHMBUS_RELAY_MAX_ENTRIES (1u << 18)
#define SHMBUS_RELAY_IDENTITY_BYTES 16u
#define SHMBUS_RELAY_FIGURES 8u
/* Bits 8 to 31 of a record's flags: for a relayed record, the number of its entry + 1. */
#define SHMBUS_FLAG_RELAY_SHIFT 8u

/* Progress of a relayed record. PREPARED counts as INTENDED if the journal's batch matches its
 * own. */
enum relay_state {
    RELAY_FREE = 0,
    RELAY_PREPARED = 1,
    RELAY_INTENDED = 2, /* write intended: on the bus once the lane's count reaches `commit` */
    RELAY_OWED = 3,     /* left unwritten by a dead sink, for its successor */
    RELAY_SETTLED = 4,  /* written; source release not confirmed yet */
};

/* A record of another bus. Its entry names the bus: no limit on the number of buses.
 * word: 0 (16 bits), slot (16), batch (28), enum relay_state (4).
 *
 * Offset  Size  Field        Written by     Read by    Order
 *      0     8  word         sink, reaper   sink       release / acquire, stored last
 *      8     8  producer_id  sink           sink       on the source bus
 *     16     8  sequence     sink           sink       the same
 *     24     8  writer       sink           collector  producer id of the sink's lane
 *     32     8  commit       sink           reaper     the lane's count after the commit
 *     40     8  ended        collector      sink       release / acquire: reason + 1, or 0
 *     48    16  identity     sink           sink       of the source bus
 */
struct relay_entry {
    _Atomic uint64_t word;
    uint64_t producer_id;
    uint64_t sequence;
    _Atomic uint64_t writer;
    uint64_t commit;
    _Atomic uint64_t ended;
    uint8_t identity[SHMBUS_RELAY_IDENTITY_BYTES];
};
_Static_assert(sizeof(struct relay_entry) == 64, "layout");

/* relay_journal | relay_entry[], sized by the bus's capacity.
 *
 * Offset  Size  Field               Written by     Read by    Order
 *      0     8  writer              sink, reaper   both       release / acquire: producer id of the
 *                                                             sink's lane, 0 after its reaping
 *      8     4  slot                sink           reaper     before writer
 *     12     4  batch               sink           reaper     release / acquire: the newest in force
 *     16     8  incarnation         sink           sink       grows with every sink
 *     24     8  source_incarnation  reader         reader     grows with every reading relay
 *     32     8  term               sink           sink       of the newest coordinator
 *     40     8  ended               collector      sink       relaxed: a hint that entries ended
 *     48     8  seen_ns             relay          anyone     CLOCK_MONOTONIC, for messages only
 *     64    64  figures             relay          anyone     for messages only
 */
struct relay_journal {
    alignas(64) _Atomic uint64_t writer;
    _Atomic uint32_t slot;
    _Atomic uint32_t batch;
    _Atomic uint64_t incarnation;
    _Atomic uint64_t source_incarnation;
    _Atomic int64_t term;
    _Atomic uint64_t ended;
    _Atomic uint64_t seen_ns;
    uint64_t reserved0;
    _Atomic uint64_t figures[SHMBUS_RELAY_FIGURES];
};
_Static_assert(sizeof(struct relay_journal) == 128, "layout");

/* Entries of a bus with `capacity` bytes. */
static inline uint32_t relay_entries_of(uint64_t capacity) {
    uint64_t entries = capacity / SHMBUS_RELAY_SHARE;
    return entries < SHMBUS_RELAY_MIN_ENTRIES   ? SHMBUS_RELAY_MIN_ENTRIES
           : entries > SHMBUS_RELAY_MAX_ENTRIES ? SHMBUS_RELAY_MAX_ENTRIES
                                                : (uint32_t)entries;
}

/* ---- Waiting time, and samples taken and released unmade by a worker. For messages.
 *
 * Invariant: delivery never reads this part. */
/* Reasons of waiting. */
enum shmbus_wait {
    SHMBUS_WAIT_SPACE = 0,  /* producers: full ring */
    SHMBUS_WAIT_PAUSED = 1, /* producers: paused bus */
    SHMBUS_WAIT_AHEAD = 2,  /* producers: no further group may begin */
    SHMBUS_WAIT_GROUPS = 3, /* trainers without a group */
    SHMBUS_WAITS = 4,
};

/* Words of a reason; they fill the row. */
#define SHMBUS_UNMADE_WORDS 9u

/* A slot's notes. `ns` and `released` grow across owners of the slot; the collector's slot holds
 * the waits of trainers. The rest belongs to the present owner; a finished sample resets it to 0.
 *
 * Offset  Size  Field           Written by         Read by  Order
 *      0    32  ns              owner, collector   anyone   relaxed: nanoseconds of waiting
 *     32     8  released        owner              anyone   relaxed: samples given back
 *     40     4  given_back      owner              anyone   relaxed: since the last sample made
 *     44     4  failed          owner              anyone   relaxed: likewise
 *     48     8  rests_until_ns  owner              anyone   relaxed: the owner gets no sample
 *                                                           earlier; CLOCK_MONOTONIC
 *     56    72  reason          owner              anyone   relaxed words: UTF-8, padded by NUL
 */
struct wait_row {
    alignas(64) _Atomic uint64_t ns[SHMBUS_WAITS];
    _Atomic uint64_t released;
    _Atomic uint32_t given_back;
    _Atomic uint32_t failed;
    _Atomic uint64_t rests_until_ns;
    _Atomic uint64_t reason[SHMBUS_UNMADE_WORDS];
};
_Static_assert(sizeof(struct wait_row) == 128, "two cache lines a slot");
