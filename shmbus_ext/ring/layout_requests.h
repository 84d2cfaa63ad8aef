/* Of layout.h: the admission table, and the request lane, the last parts before the extents.
 *
 * The same rules hold. Both lie behind everything else, so that their sizes move nothing but the
 * extents. */
#ifndef SHMBUS_RING_LAYOUT_REQUESTS_H
#define SHMBUS_RING_LAYOUT_REQUESTS_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

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

/* One sample of a group. claim: kind (2 bits, enum request_kind) | producer id (34) | number (28, of
 * its row). commit: number (28) | the lane's count once the answer is committed (36); stored before
 * the commit, so that whoever reaps a dead worker knows whether its answer is there. */
enum request_kind { CELL_NONE = 0, CELL_IS_OPEN = 1, CELL_IS_CLAIMED = 2, CELL_IS_DONE = 3 };
struct request_cell {
    _Atomic uint64_t claim;
    _Atomic uint64_t commit;
};
_Static_assert(sizeof(struct request_cell) == 16, "layout");

#endif
