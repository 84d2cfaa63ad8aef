/* Of layout.h: the relay's journal, between the lead table and the request lane.
 *
 * The same rules hold. It says which records of other buses a relay puts onto this bus, and which it
 * has put and their sources may hold too (relay_journal.h). */
#ifndef SHMBUS_RING_LAYOUT_RELAY_H
#define SHMBUS_RING_LAYOUT_RELAY_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* An entry for so many bytes of the bus: a record of 500 tokens with their numbers. A bus of smaller
 * ones holds as many relayed records as it has entries. */
#define SHMBUS_RELAY_SHARE 8192u
#ifndef SHMBUS_RELAY_MIN_ENTRIES /* the explorer's segments are small */
#define SHMBUS_RELAY_MIN_ENTRIES 64u
#endif
#define SHMBUS_RELAY_MAX_ENTRIES (1u << 18)
/* Buses that records may come from: more than there are nodes in the largest runs. */
#ifndef SHMBUS_RELAY_SOURCES
#define SHMBUS_RELAY_SOURCES 256u
#endif
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

/* A record of another bus. word: source (16 bits), slot (16), batch (28), enum relay_state (4).
 *
 * Offset  Size  Field        Written by     Read by    Order
 *      0     8  word         sink, reaper   sink       release / acquire, after the others
 *      8     8  producer_id  sink           sink       on its own bus
 *     16     8  sequence     sink           sink       the same
 *     24     8  writer       sink           collector  producer id of the sink's lane
 *     32     8  commit       sink           reaper     that lane's count once it is committed
 *     40     8  ended        collector      sink       release / acquire: reason + 1, or 0
 */
struct relay_entry {
    _Atomic uint64_t word;
    uint64_t producer_id;
    uint64_t sequence;
    _Atomic uint64_t writer;
    uint64_t commit;
    _Atomic uint64_t ended;
};
_Static_assert(sizeof(struct relay_entry) == 48, "layout");
_Static_assert(offsetof(struct relay_entry, writer) == 24, "layout");
_Static_assert(offsetof(struct relay_entry, ended) == 40, "layout");

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
 *    128  4096  sources             sink           sink       identities; all 0 where free
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
    uint8_t sources[SHMBUS_RELAY_SOURCES][SHMBUS_RELAY_IDENTITY_BYTES];
};
_Static_assert(offsetof(struct relay_journal, batch) == 12, "layout");
_Static_assert(offsetof(struct relay_journal, term) == 32, "layout");
_Static_assert(offsetof(struct relay_journal, figures) == 64, "layout");
_Static_assert(offsetof(struct relay_journal, sources) == 128, "layout");

/* Entries of a bus of so many bytes. */
static inline uint32_t relay_entries_of(uint64_t capacity) {
    uint64_t entries = capacity / SHMBUS_RELAY_SHARE;
    return entries < SHMBUS_RELAY_MIN_ENTRIES   ? SHMBUS_RELAY_MIN_ENTRIES
           : entries > SHMBUS_RELAY_MAX_ENTRIES ? SHMBUS_RELAY_MAX_ENTRIES
                                                : (uint32_t)entries;
}

#endif
