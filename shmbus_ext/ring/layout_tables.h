/* Of layout.h, which includes this: the tables beside the ring itself. */
#ifndef SHMBUS_RING_LAYOUT_TABLES_H
#define SHMBUS_RING_LAYOUT_TABLES_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* ---- The part of the segment that is about splits, and about groups that ended early: layout.h includes
 * this, and nothing else does. */
/* Splits of a bus, "train" and others: a label each in its table. Few enough for a counter each. */
#define SHMBUS_MAX_SPLITS 16u
/* The split of records that nobody gave one: what is trained on. */
#define SHMBUS_SPLIT_TRAIN 0u
#define SHMBUS_SPLIT_TRAIN_LABEL "train"
/* Of a split's label, in UTF-8; with its length it fills four words. */
#define SHMBUS_SPLIT_LABEL_BYTES 31u
/* The groups that ended last without all of their samples: what their workers may ask about. */
#define SHMBUS_CANCELLED 1024u

/* A split: its label, and the ledger of its records. The first word of the label begins with the
 * length, so a word that belongs to the label is never 0, and one that is 0 is not written yet.
 *
 * Offset  Size  Field          Written by       Read by  Order
 *      0    32  label          who needs it     all      CAS from 0, word by word
 *     32     8  acked          collector        all      relaxed; exact through the intent
 *     40     8  dropped        collector        all      the same
 *     48     8  stashed        collector        all      relaxed, for messages only
 *     56     4  ready_groups   collector        all      the same
 *     60     4  open_groups    collector        all      the same
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
_Static_assert(offsetof(struct split_entry, acked) == 32, "layout");

/* ---- The part of the segment that asks producers for single samples again: layout.h includes this, and
 * nothing else does. */
/* Open retry requests: a failing fleet is not helped by more. */
#define SHMBUS_RETRY_ENTRIES 128u
#define SHMBUS_RETRY_ID_BYTES 256u
#define SHMBUS_RETRY_REASON_BYTES 192u

/* A retry request. `claim` is FREE, BUSY while the collector changes the entry, or the id of the
 * producer that has claimed it, plus 1; with bit ANSWERED from just before the answer's commit on.
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
/* The `attempt` of the row that pauses the request lane, and asks for no sample. `reason` says why,
 * `round` since when (CLOCK_REALTIME, ns), `id` nothing. While there is one, a worker takes a sample
 * only once it has claimed that row; the collector publishes it anew for each. */
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
    uint32_t late; /* 1: the sample missed its group's deadline; the first try may still run */
    uint32_t reserved0;
    uint32_t crc;
    char id[SHMBUS_RETRY_ID_BYTES];
    char reason[SHMBUS_RETRY_REASON_BYTES];
};
_Static_assert(sizeof(struct retry_entry) == 512, "layout");
_Static_assert(offsetof(struct retry_entry, number) == 8, "layout");
_Static_assert(offsetof(struct retry_entry, need) == 48, "layout");
_Static_assert(offsetof(struct retry_entry, late) == 52, "layout");
_Static_assert(offsetof(struct retry_entry, crc) == 60, "layout");
_Static_assert(offsetof(struct retry_entry, id) == 64, "layout");

/* ---- Of layout.h: the admission table, and the request lane, the last parts before the extents.
 *
 * The same rules hold. Both lie behind everything else, so that their sizes move nothing but the
 * extents. */
/* Groups that may be admitted and not delivered yet, where a bus bounds them: more than a step of
 * any trainer has, and a table that a process goes through in microseconds. */
#define SHMBUS_LEAD_ROWS 4096u
/* The request lane's share of a bus, and its least: prompts are small beside trajectories. */
#define SHMBUS_REQUEST_SHARE 32u
#define SHMBUS_REQUEST_MIN_BYTES (UINT64_C(64) << 10)
#define SHMBUS_REQUEST_MAX_BYTES (UINT64_C(1) << 32)
/* Priorities, 0 for the last to be taken. */
#define SHMBUS_REQUEST_LEVELS 8u
/* How the lane divides its bytes: a row for so many of them, and so many samples for a row. A unit
 * holds a part of a prompt, a block of cells a part of a group. */
#define SHMBUS_REQUEST_ROW_SHARE 2048u
#define SHMBUS_REQUEST_MIN_ROWS 16u
#define SHMBUS_REQUEST_MAX_ROWS 16384u
#define SHMBUS_REQUEST_CELLS_A_ROW 16u
#define SHMBUS_REQUEST_CELLS_A_BLOCK 8u
#define SHMBUS_REQUEST_UNIT 64u

/* Which groups are admitted (lead.h).
 *
 * Offset  Size  Field             Written by             Read by    Order
 *      0     4  limit             creator, collector     producers  relaxed; 0 for no bound
 *      4     8  max_groups, ...   creator                all        before magic
 *     16    32  version, ...      collector              collector  a bound in versions counts them
 *     64     8  rows[]            producers, collector   both       CAS
 */
struct lead_table {
    alignas(64) _Atomic uint32_t limit;
    uint32_t max_groups;   /* 0 for no bound in groups */
    uint32_t max_versions; /* one more than the bound in versions, or 0 */
    uint32_t reserved0;
    int64_t version;       /* the policy version that `ended_before` is of */
    uint64_t ended;        /* groups that were delivered and have ended, since the bus was created */
    uint64_t ended_before; /* the same when the present version began, with what was trained by then */
    uint64_t a_version;    /* groups that the last version had */
    uint64_t reserved1[2];
    _Atomic uint64_t rows[]; /* SHMBUS_LEAD_ROWS */
};
_Static_assert(offsetof(struct lead_table, max_groups) == 4, "layout");
_Static_assert(offsetof(struct lead_table, version) == 16, "layout");
_Static_assert(offsetof(struct lead_table, a_version) == 40, "layout");
_Static_assert(offsetof(struct lead_table, rows) == 64, "layout");

/* The request lane (requests.h): request_lane | request_row[rows] | order (u32[levels][rows])
 * | request_cell[cells] | bits of cells' blocks (u64) | bits of units (u64) | units. How many there
 * are follows from the bytes between the lead table and the extents.
 *
 * Offset  Size  Field          Written by          Read by    Order
 *      0     8  work           feeders, givers     workers    bell: there may be a sample to make
 *      8     8  room           collector           feeders    bell: there may be room
 *     16     8  taken_ns       workers             all        relaxed; CLOCK_MONOTONIC, for messages
 *     64     4  feeding        feeder              all        odd while the lock's holder changes rows
 *     68    12  ..._hint       feeder              feeder     where the next search begins
 *     80     8  number         feeder              all        of the last request
 *     88     8  offered        feeder              all        samples, since the bus was created
 *     96     8  done           feeder              all        samples of rows that are free again
 *    104     8  given_up       feeder              all        the same
 *    112    24  freeing, ...   feeder              feeders    the row that is being freed
 *    192     4  returned       workers, reapers    workers    1 while a row may have one given back
 *    256   ...  heads          workers             workers    where each priority's order begins
 *    384   ...  tails          feeder              workers    release / acquire: where it ends
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
_Static_assert(offsetof(struct request_lane, feeding) == 64, "layout");
_Static_assert(offsetof(struct request_lane, number) == 80, "layout");
_Static_assert(offsetof(struct request_lane, freeing) == 112, "layout");
_Static_assert(offsetof(struct request_lane, returned) == 192, "layout");
_Static_assert(offsetof(struct request_lane, heads) == 256, "layout");
_Static_assert(offsetof(struct request_lane, tails) == 384, "layout");

/* One prompt's group. word is number << 2 | enum request_state.
 *
 * Offset  Size  Field        Written by           Read by    Order
 *      0     8  word         feeder, collector    all        release / acquire: OPEN after all else
 *      8    64  place, ...   feeder               all        before word; crc covers 8..68
 *     72     8  next         workers              workers    CAS: number (28) | no sample before
 *                                                            this one (32) is new
 *     80     4  returned     workers, reapers     workers    1 where one before it may be open
 *     84     4  admitted     workers              all        1 once a sample was handed out
 *     88     8  ended_...    collector            feeder     before word ENDED
 */
enum request_state { REQUEST_FREE = 0, REQUEST_BUSY = 1, REQUEST_OPEN = 2, REQUEST_ENDED = 3 };
struct request_row {
    alignas(64) _Atomic uint64_t word;
    uint64_t place; /* in the order of its priority */
    int64_t round;
    uint64_t offered_ns; /* CLOCK_MONOTONIC */
    uint64_t offered;    /* samples of the lane with this row's */
    uint32_t first_cell;
    uint32_t first_unit;
    uint32_t data_bytes; /* id and prompt, one behind the other */
    uint32_t data_crc;
    uint16_t group_size;
    uint16_t need;
    uint16_t id_bytes;
    uint16_t split; /* of its records */
    uint16_t level;
    uint16_t reserved0;
    uint32_t crc;
    _Atomic uint64_t next;
    _Atomic uint32_t returned;
    _Atomic uint32_t admitted;
    uint32_t ended_done;
    uint32_t ended_given_up;
    uint64_t reserved1[4];
};
_Static_assert(sizeof(struct request_row) == 128, "layout");
_Static_assert(offsetof(struct request_row, first_cell) == 40, "layout");
_Static_assert(offsetof(struct request_row, group_size) == 56, "layout");
_Static_assert(offsetof(struct request_row, crc) == 68, "layout");
_Static_assert(offsetof(struct request_row, next) == 72, "layout");
_Static_assert(offsetof(struct request_row, ended_done) == 88, "layout");

/* One sample of a group. claim: kind (2 bits, enum request_kind) | producer id (34, all ones of one
 * that another node makes) | number (28, of its row). DONE with a producer: that producer commits
 * the answer. commit: number (28) | the lane's count once the answer is committed (36); stored
 * before the commit, so that whoever reaps a dead worker knows whether its answer is there. */
enum request_kind { CELL_NONE = 0, CELL_IS_OPEN = 1, CELL_IS_CLAIMED = 2, CELL_IS_DONE = 3 };
struct request_cell {
    _Atomic uint64_t claim;
    _Atomic uint64_t commit;
};
_Static_assert(sizeof(struct request_cell) == 16, "layout");

/* ---- Of layout.h: the relay's journal, between the lead table and the request lane.
 *
 * The same rules hold. It says which records of other buses a relay puts onto this bus, and which it
 * has put and their sources may hold too (relay_journal.h). */
/* An entry for so many bytes of the bus: a record of 500 tokens with their numbers. A bus of smaller
 * ones holds as many relayed records as it has entries. */
#define SHMBUS_RELAY_SHARE 8192u
#ifndef SHMBUS_RELAY_MIN_ENTRIES /* the explorer's segments are small */
#define SHMBUS_RELAY_MIN_ENTRIES 64u
#endif
#define SHMBUS_RELAY_MAX_ENTRIES (1u << 18)
#define SHMBUS_RELAY_IDENTITY_BYTES 16u
#define SHMBUS_RELAY_FIGURES 8u
/* Bits 8 to 31 of a record's flags, of one from another bus: its entry's number, + 1. */
#define SHMBUS_FLAG_RELAY_SHIFT 8u

/* What has become of a record. PREPARED counts as INTENDED once the journal's batch is its own. */
enum relay_state {
    RELAY_FREE = 0,
    RELAY_PREPARED = 1,
    RELAY_INTENDED = 2, /* it is put next: on the bus once the lane's count has come to `commit` */
    RELAY_OWED = 3,     /* of a sink that died before it had put it: its successor does */
    RELAY_SETTLED = 4,  /* it was put; its source has not said that it released it */
};

/* A record of another bus. Its entry names the bus, so any number of buses fit.
 * word: 0 (16 bits), slot (16), batch (28), enum relay_state (4).
 *
 * Offset  Size  Field        Written by     Read by    Order
 *      0     8  word         sink, reaper   sink       release / acquire, after the others
 *      8     8  producer_id  sink           sink       on its own bus
 *     16     8  sequence     sink           sink       the same
 *     24     8  writer       sink           collector  producer id of the sink's lane
 *     32     8  commit       sink           reaper     that lane's count once it is committed
 *     40     8  ended        collector      sink       release / acquire: reason + 1, or 0
 *     48    16  identity     sink           sink       of its own bus
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
_Static_assert(offsetof(struct relay_entry, writer) == 24, "layout");
_Static_assert(offsetof(struct relay_entry, ended) == 40, "layout");
_Static_assert(offsetof(struct relay_entry, identity) == 48, "layout");

/* relay_journal | relay_entry[], as many as the capacity says.
 *
 * Offset  Size  Field               Written by     Read by    Order
 *      0     8  writer              sink, reaper   both       release / acquire: producer id of the
 *                                                             sink's lane, 0 once it was reaped
 *      8     4  slot                sink           reaper     before writer
 *     12     4  batch               sink           reaper     release / acquire: the newest in force
 *     16     8  incarnation         sink           sink       grows with each sink
 *     24     8  source_incarnation  reader         reader     grows with each relay that reads it
 *     32     8  term               sink           sink       of the newest coordinator
 *     40     8  ended               collector      sink       relaxed: a hint that entries ended
 *     48     8  seen_ns             relay          all        CLOCK_MONOTONIC, for messages only
 *     64    64  figures             relay          all        for messages only
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
_Static_assert(offsetof(struct relay_journal, batch) == 12, "layout");
_Static_assert(offsetof(struct relay_journal, term) == 32, "layout");
_Static_assert(offsetof(struct relay_journal, figures) == 64, "layout");
_Static_assert(sizeof(struct relay_journal) == 128, "layout");

/* Entries of a bus of so many bytes. */
static inline uint32_t relay_entries_of(uint64_t capacity) {
    uint64_t entries = capacity / SHMBUS_RELAY_SHARE;
    return entries < SHMBUS_RELAY_MIN_ENTRIES   ? SHMBUS_RELAY_MIN_ENTRIES
           : entries > SHMBUS_RELAY_MAX_ENTRIES ? SHMBUS_RELAY_MAX_ENTRIES
                                                : (uint32_t)entries;
}

/* ---- Of layout.h: waiting time, and samples that a worker takes and does not make. For messages.
 *
 * Invariant: delivery never reads this part. */
/* What is waited for. */
enum shmbus_wait {
    SHMBUS_WAIT_SPACE = 0,  /* by producers: the ring is full */
    SHMBUS_WAIT_PAUSED = 1, /* by producers: the bus is paused */
    SHMBUS_WAIT_AHEAD = 2,  /* by producers: no further group may begin */
    SHMBUS_WAIT_GROUPS = 3, /* by trainers that hold none */
    SHMBUS_WAITS = 4,
};

/* Words of a reason, which fill the row. */
#define SHMBUS_UNMADE_WORDS 9u

/* A slot's notes. `ns` and `released` grow over all owners of the slot; the collector's slot has the
 * waits of trainers. The rest is the present owner's, and 0 once the owner made a sample.
 *
 * Offset  Size  Field           Written by         Read by  Order
 *      0    32  ns              owner, collector   all      relaxed: nanoseconds of waiting
 *     32     8  released        owner              all      relaxed: samples given back
 *     40     4  given_back      owner              all      relaxed: since the last sample made
 *     44     4  failed          owner              all      relaxed: likewise
 *     48     8  rests_until_ns  owner              all      relaxed: the owner gets no sample until
 *                                                           then; CLOCK_MONOTONIC
 *     56    72  reason          owner              all      relaxed words: UTF-8, padded by NUL
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
_Static_assert(offsetof(struct wait_row, released) == 32, "layout");
_Static_assert(offsetof(struct wait_row, given_back) == 40, "layout");
_Static_assert(offsetof(struct wait_row, failed) == 44, "layout");
_Static_assert(offsetof(struct wait_row, rests_until_ns) == 48, "layout");
_Static_assert(offsetof(struct wait_row, reason) == 56, "layout");

#endif
