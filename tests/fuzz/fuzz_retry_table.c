/* The retry table, damaged between the calls of its collector and its producers. Values read stay
 * inside their limits and agree with their checksum. An untouched entry is whole, and claimed by a
 * single producer at a time.
 *
 * Input: acts of 5 bytes: act (1), entry (1), value (1), place (2). */
#include "base/checksum.h"
#include "fuzz.h"
#include "ring/retry_table.h"

#define MOST_ACTS 200
#define SEALED_FROM offsetof(struct retry_entry, number)
#define SEALED_BYTES (sizeof(struct retry_entry) - SEALED_FROM)
enum { ROWS = 3, PRODUCERS = 4 };

static struct segment segment;
static struct row_state {
    struct retry_entry asked;
    bool sound;      /* untouched since its publication */
    /* Content at its last checksum. */
    uint8_t sealed[SEALED_BYTES];
    uint64_t seen;   /* the last number read */
    uint64_t holder; /* producer id + 1 */
} rows[ROWS];

static void prepare(void) {
    struct segment_geometry plan;
    CHECK(segment_plan(64u << 10, 3, SHMBUS_PAGE, &plan));
    CHECK(segment_create(&segment, memory_file(), &plan) == SHARED_OK);
}

static void note_seal(uint32_t at) {
    memcpy(rows[at].sealed, (const uint8_t *)&segment.retries[at] + SEALED_FROM, SEALED_BYTES);
}

static bool is_damaged(uint32_t at) {
    const uint8_t *now = (const uint8_t *)&segment.retries[at] + SEALED_FROM;
    return memcmp(rows[at].sealed, now, SEALED_BYTES) != 0;
}

static void publish(uint32_t at, uint64_t number, uint8_t value, uint16_t where) {
    struct retry_entry *asked = &rows[at].asked;
    memset(asked, 0, sizeof *asked);
    asked->number = number;
    asked->round = where;
    asked->asked_ns = value;
    asked->group_size = where % (SHMBUS_MAX_GROUP_SIZE + 1);
    asked->need = (uint16_t)(asked->group_size / 2);
    asked->split = value % SHMBUS_MAX_SPLITS;
    asked->index = where % SHMBUS_MAX_GROUP_SIZE;
    asked->attempt = value;
    asked->id_bytes = (uint16_t)(value % SHMBUS_MAX_ID_BYTES + 1);
    asked->reason_bytes = where % (SHMBUS_RETRY_REASON_BYTES + 1);
    memset(asked->id, 'a' + value % 26, asked->id_bytes);
    memset(asked->reason, 'A' + value % 26, asked->reason_bytes);
    retry_publish(&segment, at, asked);
    rows[at].sound = true;
    rows[at].holder = 0;
    note_seal(at);
}

static void read_row(uint32_t at) {
    struct row_state *row = &rows[at];
    /* A separate block: a sanitizer sees a byte too many. */
    struct retry_entry *copy = aligned_alloc(alignof(struct retry_entry), sizeof *copy);
    CHECK(copy != NULL);
    row->seen = 0;
    if (retry_read(&segment, at, copy)) {
        CHECK(copy->id_bytes >= 1 && copy->id_bytes <= SHMBUS_MAX_ID_BYTES);
        CHECK(copy->reason_bytes <= SHMBUS_RETRY_REASON_BYTES);
        CHECK(copy->group_size <= SHMBUS_MAX_GROUP_SIZE && copy->index < SHMBUS_MAX_GROUP_SIZE);
        CHECK(copy->need <= copy->group_size && copy->split < SHMBUS_MAX_SPLITS);
        CHECK(copy->number != 0 && copy->claim != SHMBUS_RETRY_BUSY);
        CHECK(!is_damaged(at));
        row->seen = copy->number;
        if (row->sound) {
            row->asked.claim = row->holder;
            row->asked.crc = copy->crc;
            CHECK(memcmp(copy, &row->asked, sizeof *copy) == 0);
        }
    } else {
        CHECK(!row->sound);
    }
    free(copy);
}

static void claim(uint32_t at, uint64_t producer) {
    struct row_state *row = &rows[at];
    struct retry_entry copy;
    bool got = retry_claim(&segment, at, row->seen, producer, &copy);
    if (row->sound) {
        CHECK(got == (row->holder == 0 && row->seen == row->asked.number));
    }
    row->holder = got ? producer + 1 : row->holder;
}

static void unclaim(uint32_t at, uint64_t producer) {
    struct row_state *row = &rows[at];
    bool had = retry_unclaim(&segment, at, row->asked.number, producer);
    if (row->sound) {
        CHECK(had == (row->holder == producer + 1));
    }
    row->holder = had ? 0 : row->holder;
}

static void scribble(uint32_t at, uint8_t value, uint16_t where, bool reseal) {
    struct retry_entry *row = &segment.retries[at];
    uint8_t *bytes = (uint8_t *)row;
    bytes[where % sizeof *row] = value;
    if (reseal) {
        size_t head = offsetof(struct retry_entry, crc) - SEALED_FROM;
        uint32_t crc = shmbus_crc32c(0, bytes + SEALED_FROM, head);
        row->crc = shmbus_crc32c(crc, row->id, SHMBUS_RETRY_ID_BYTES + SHMBUS_RETRY_REASON_BYTES);
        note_seal(at);
    }
    rows[at].sound = false;
}

static void scribble_claim(uint32_t at, uint8_t value) {
    uint64_t claim = value % 3 == 0   ? SHMBUS_RETRY_BUSY
                     : value % 3 == 1 ? SHMBUS_RETRY_FREE
                                      : value * UINT64_C(0x0101010101010101);
    atomic_store(&segment.retries[at].claim, claim);
    rows[at].sound = false;
}

static void act(const uint8_t *what, uint64_t number) {
    uint32_t at = what[1] % ROWS;
    uint8_t value = what[2];
    uint16_t where = (uint16_t)(what[3] | what[4] << 8);
    switch (what[0] % 8) {
    case 0:
        publish(at, number, value, where);
        break;
    case 1:
        retry_withdraw(&segment, at);
        rows[at].sound = false;
        break;
    case 2:
        read_row(at);
        break;
    case 3:
        claim(at, value % PRODUCERS);
        break;
    case 4:
        unclaim(at, value % PRODUCERS);
        break;
    case 5:
        scribble(at, value, where, false);
        break;
    case 6:
        scribble(at, value, where, true);
        break;
    default:
        scribble_claim(at, value);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (segment.base == NULL) {
        prepare();
    }
    memset(segment.retries, 0, ROWS * sizeof segment.retries[0]);
    memset(rows, 0, sizeof rows);
    uint64_t number = 0;
    for (; size >= 5 && number < MOST_ACTS; data += 5, size -= 5) {
        act(data, ++number);
    }
    for (uint32_t at = 0; at < ROWS; at++) {
        /* Over any damage a new request is whole, and can be taken. */
        publish(at, ++number, (uint8_t)at, 7);
        read_row(at);
        claim(at, at);
        CHECK(rows[at].holder == at + 1);
    }
    return 0;
}
