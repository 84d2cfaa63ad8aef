/* Promises of the ring, told as a ghost that sees everything.
 *
 * - A committed record is delivered until its acknowledgement, never afterwards, with the content
 *   of its producer. A commit interrupted by death may count, or not.
 * - Records of a producer keep their order: a record committed before the claim of a second record,
 *   or before the commit of a later one behind it, is delivered first, unless either was moved.
 * - An acknowledgement covers all of its records, or none.
 * - The holder of an extent's lease writes its bytes; a record's state is the exception.
 * - A free extent has no open record of a living producer, and no committed record without an
 *   acknowledgement.
 * - No process waits for a stopped or dead process: living processes go on, no wake-up is lost
 *   while a sleeper has work, and every run ends (engine.c).
 * - At the end the numbers agree: commits counted by the lanes, acknowledgements counted by the
 *   segment, records seen by the ghost; nothing is corrupt or unread, no extent is lost. */
#include "actors.h"

#include <string.h>

#include "ring/reader.h"

_Static_assert(MAX_RECORDS <= 8, "a bit for each record");

static struct ghost *ghost(void) {
    return &world.control.ghost;
}

static struct ghost_record *ghost_of(uint64_t life, uint64_t number) {
    if (life >= MAX_LIVES || number >= MAX_RECORDS) {
        engine_fail("a record %llu/%llu that nobody wrote", (unsigned long long)life,
                    (unsigned long long)number);
    }
    return &ghost()->records[life][number];
}

uint8_t ghost_pattern(uint64_t life, uint64_t number) {
    return (uint8_t)(0x40 + life * 8 + number);
}

static bool ack_may_be_done(const struct ghost_record *record) {
    return record->acked == ACK_DONE ||
           (record->acked == ACK_BEGUN && !engine_is_alive(ghost()->ack_set_owner[record->ack_set]));
}

/* Whether the bytes of a record are still needed. */
static bool in_use(const struct ghost_record *record) {
    switch (record->fate) {
    case R_OPEN:
    case R_BEGUN:
        return engine_is_alive(record->owner);
    case R_COMMITTED:
        return !ack_may_be_done(record) && !record->moving;
    default:
        return false;
    }
}

static const struct ghost_record *find_in_use(uint32_t from, uint32_t to,
                                              const struct ghost_record *except) {
    for (unsigned i = 0; i < MAX_LIVES * MAX_RECORDS; i++) {
        const struct ghost_record *record = &ghost()->records[0][0] + i;
        if (record != except && record->fate != R_NONE && record->from < to && from < record->to &&
            in_use(record)) {
            return record;
        }
    }
    return NULL;
}

static void place(struct ghost_record *record, const struct record_place *at, uint64_t bytes) {
    record->from = (uint32_t)(template_segment.data_offset +
                              at->extent * template_segment.extent_bytes + at->offset);
    record->to = record->from + (uint32_t)bytes;
}

#define ANY_EXTENT UINT32_MAX

static uint32_t extent_of(const struct ghost_record *record) {
    return (uint32_t)((record->from - template_segment.data_offset) /
                      template_segment.extent_bytes);
}

/* Present commits come before this record: every commit, or those in front of it in an extent. */
static void note_before(uint64_t life, struct ghost_record *record, uint32_t extent) {
    for (unsigned i = 0; i < MAX_RECORDS; i++) {
        const struct ghost_record *other = &ghost()->records[life][i];
        bool in_front = extent_of(other) == extent && other->from < record->from;
        if (other->fate == R_COMMITTED && (extent == ANY_EXTENT || in_front)) {
            record->before |= (uint8_t)(1u << i);
        }
    }
}

void ghost_claimed(uint64_t life, uint64_t number, const struct reservation *at) {
    struct ghost_record *record = ghost_of(life, number);
    memset(record, 0, sizeof *record);
    place(record, &at->place, at->bytes);
    record->owner = (uint8_t)running;
    if (find_in_use(record->from, record->to, record) != NULL) {
        engine_fail("P%d claims bytes %u to %u, which hold a record in use", running, record->from,
                    record->to);
    }
    record->fate = R_OPEN;
    note_before(life, record, ANY_EXTENT);
}

void ghost_begin_commit(uint64_t life, uint64_t number) {
    struct ghost_record *record = ghost_of(life, number);
    record->fate = R_BEGUN;
    note_before(life, record, extent_of(record));
}

void ghost_committed(uint64_t life, uint64_t number) {
    ghost_of(life, number)->fate = R_COMMITTED;
}

void ghost_aborted(uint64_t life, uint64_t number) {
    ghost_of(life, number)->fate = R_ABORTED;
}

unsigned ghost_new_reader(void) {
    return ghost()->readers++;
}

static void check_content(const struct reader *reader, const struct record_ref *ref, uint64_t life,
                          uint64_t number) {
    const uint8_t *x = segment_extent(reader->segment, ref->place.extent) + ref->place.offset +
                       reader->copy.shape[0];
    for (uint64_t i = 0; i < reader->copy.shape[1]; i++) {
        if (x[i] != ghost_pattern(life, number)) {
            engine_fail("record %llu/%llu is torn: byte %llu is 0x%02x, expected 0x%02x",
                        (unsigned long long)life, (unsigned long long)number,
                        (unsigned long long)i, x[i], ghost_pattern(life, number));
        }
    }
}

static void check_order(uint64_t life, uint64_t number, unsigned reader_life) {
    for (unsigned i = 0; i < MAX_RECORDS; i++) {
        const struct ghost_record *other = &ghost()->records[life][i];
        if ((other->delivered_to & 1u << reader_life) && (other->before & 1u << number)) {
            engine_fail("record %llu/%llu is delivered after %u, which comes behind it",
                        (unsigned long long)life, (unsigned long long)number, i);
        }
    }
}

void ghost_delivered(const struct reader *reader, const struct record_ref *ref,
                     unsigned reader_life) {
    const struct record_header *header = &reader->copy.header;
    uint64_t life = header->producer_id;
    uint64_t number = header->sequence;
    struct ghost_record *record = ghost_of(life, number);
    if (record->fate != R_BEGUN && record->fate != R_COMMITTED) {
        engine_fail("record %llu/%llu is delivered, and was never committed",
                    (unsigned long long)life, (unsigned long long)number);
    }
    if (record->acked == ACK_DONE ||
        (record->acked == ACK_BEGUN && engine_is_alive(ghost()->ack_set_owner[record->ack_set]))) {
        engine_fail("record %llu/%llu is delivered after it was acknowledged",
                    (unsigned long long)life, (unsigned long long)number);
    }
    if (record->delivered_to & 1u << reader_life) {
        engine_fail("record %llu/%llu is delivered twice to one collector",
                    (unsigned long long)life, (unsigned long long)number);
    }
    if (record->acked == ACK_BEGUN) {
        ghost()->ack_set_undone[record->ack_set] = 1;
        record->acked = ACK_NONE;
    }
    if ((header->flags & SHMBUS_FLAG_MOVED) != 0) {
        record->before = 0;
    } else {
        check_order(life, number, reader_life);
    }
    record->delivered_to |= (uint16_t)(1u << reader_life);
    record->moving = 0;
    record->fate = R_COMMITTED;
    place(record, &ref->place, ref->bytes);
    check_content(reader, ref, life, number);
}

void ghost_begin_ack(const uint64_t (*keys)[2], unsigned n) {
    uint8_t set = ghost()->ack_sets++;
    if (set >= MAX_ACK_SETS) {
        engine_fail("more than %d acknowledgements: make the scenario smaller", MAX_ACK_SETS);
    }
    ghost()->ack_set_owner[set] = (uint8_t)running;
    for (unsigned i = 0; i < n; i++) {
        struct ghost_record *record = ghost_of(keys[i][0], keys[i][1]);
        record->acked = ACK_BEGUN;
        record->ack_set = set;
    }
}

void ghost_acked(const uint64_t (*keys)[2], unsigned n) {
    for (unsigned i = 0; i < n; i++) {
        ghost_of(keys[i][0], keys[i][1])->acked = ACK_DONE;
    }
}

void ghost_moving(uint64_t life, uint64_t number, const struct record_ref *to) {
    struct ghost_record *record = ghost_of(life, number);
    record->moving = to == NULL;
    if (to != NULL) {
        place(record, &to->place, to->bytes);
    }
}

static void check_freed(uint32_t extent, uint64_t word) {
    uint32_t from =
        (uint32_t)(template_segment.data_offset + extent * template_segment.extent_bytes);
    const struct ghost_record *record =
        find_in_use(from, from + (uint32_t)template_segment.extent_bytes, NULL);
    if (record != NULL) {
        engine_fail("P%d frees extent %u (word %llx), where a record of P%d is %s", running, extent,
                    (unsigned long long)word, record->owner,
                    record->fate == R_COMMITTED ? "committed and not acknowledged" : "open");
    }
}

void ghost_arrived(uint32_t offset, uint64_t before, uint64_t after) {
    uint32_t first = (uint32_t)((uint8_t *)template_segment.extents - template_segment.base);
    uint32_t extent = (offset - first) / (uint32_t)sizeof(struct extent_desc);
    uint32_t claim_at = (uint32_t)((uint8_t *)&template_segment.retries->claim -
                                   template_segment.base);
    if (offset == claim_at) {
        ghost_claim_word(before, after);
    } else if (offset >= first && extent < template_segment.extent_count &&
               (offset - first) % sizeof(struct extent_desc) ==
                   offsetof(struct extent_desc, word) &&
               link_low(before) != 0 && link_low(after) == 0) {
        check_freed(extent, before);
    }
}

void ghost_written(int process, uint32_t offset) {
    if (offset < template_segment.data_offset) {
        return;
    }
    uint32_t extent =
        (offset - (uint32_t)template_segment.data_offset) / (uint32_t)template_segment.extent_bytes;
    uint32_t word_at = (uint32_t)((uint8_t *)&template_segment.extents[extent].word -
                                  template_segment.base);
    uint32_t slot = link_low(memory_word(word_at, 8)) - 1;
    const uint8_t *owners = world.control.exclusive;
    if (slot < template_segment.max_producers && owners[slot] == process + 1) {
        return;
    }
    bool collects = owners[COLLECTOR_LOCK] == process + 1;
    if (collects && (slot == template_segment.max_producers || offset % SHMBUS_RECORD_ALIGN == 0)) {
        return;
    }
    engine_fail("P%d writes byte %u of extent %u, which slot %d holds", process,
                offset - (uint32_t)(template_segment.data_offset +
                                    extent * template_segment.extent_bytes),
                extent, (int)slot);
}

/* Whether a sleeper on this word should be awake: a producer, since everyone else is done or asleep
 * too; a collector beside an undelivered record. A patient process waits for a request. */
bool ghost_is_owed(int process) {
    if (world.processes[process].patient) {
        return ghost_wants_in_vain();
    }
    if (world.processes[process].futex != (uint32_t)offsetof(struct bus_header, bell)) {
        return true;
    }
    for (unsigned i = 0; i < MAX_LIVES * MAX_RECORDS; i++) {
        const struct ghost_record *record = &ghost()->records[0][0] + i;
        if (record->fate == R_COMMITTED && record->delivered_to == 0) {
            return true;
        }
    }
    return false;
}

static uint64_t count_acked(void) {
    uint64_t acked = 0;
    for (unsigned life = 0; life < MAX_LIVES; life++) {
        for (unsigned number = 0; number < MAX_RECORDS; number++) {
            const struct ghost_record *record = &ghost()->records[life][number];
            if (record->acked == ACK_BEGUN && ghost()->ack_set_undone[record->ack_set]) {
                engine_fail("record %u/%u was acknowledged, others of its group were not", life,
                            number);
            }
            if (record->fate == R_COMMITTED && record->acked == ACK_NONE) {
                engine_fail("record %u/%u is lost: committed, and not delivered since", life,
                            number);
            }
            acked += record->acked != ACK_NONE;
        }
    }
    return acked;
}

void ghost_end(struct reader *reader) {
    struct segment *segment = reader->segment;
    uint64_t acked = count_acked();
    uint64_t committed;
    uint64_t unread = reader_count_unread(reader, &committed);
    if (unread != 0 || committed != acked) {
        engine_fail("the lanes count %llu commits, of which %llu unread; %llu were acknowledged",
                    (unsigned long long)committed, (unsigned long long)unread,
                    (unsigned long long)acked);
    }
    for (int reason = 0; reason < SHMBUS_REASONS; reason++) {
        uint32_t at = (uint32_t)((uint8_t *)&template_segment.header->released[reason] -
                                 template_segment.base);
        uint64_t expected = reason == SHMBUS_ACKED ? acked : 0;
        if (memory_word(at, 8) != expected) {
            engine_fail("released[%d] is %llu, expected %llu", reason,
                        (unsigned long long)memory_word(at, 8), (unsigned long long)expected);
        }
    }
    /* The collector keeps an extent ready for its own lane. */
    uint32_t free_extents = extent_count_free(segment);
    if (free_extents + 1 < segment->extent_count) {
        engine_fail("%u of %u extents are free at the end", free_extents, segment->extent_count);
    }
}
