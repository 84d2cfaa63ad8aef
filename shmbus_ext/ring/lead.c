/* The admission table of lead.h. */
#include "lead.h"

#include "base/failpoints.h"

/* A word: hash << SLOT_BITS | slot + 1 of a claimant, or 0 in these bits after settlement. */
#define SLOT_BITS 13u
#define SLOT_MASK ((UINT64_C(1) << SLOT_BITS) - 1)
_Static_assert(SHMBUS_MAX_PRODUCERS + 1 <= SLOT_MASK, "a word holds every slot");

static uint64_t mixed(uint64_t value) {
    value ^= value >> 33;
    value *= UINT64_C(0xFF51AFD7ED558CCD);
    value ^= value >> 33;
    value *= UINT64_C(0xC4CEB9FE1A85EC53);
    return value ^ value >> 33;
}

static uint64_t named(uint64_t hash) {
    hash &= ~SLOT_MASK;
    return hash != 0 ? hash : SLOT_MASK + 1;
}

uint64_t lead_key(const char *id, uint32_t id_bytes, int64_t round, uint32_t split) {
    uint64_t hash = UINT64_C(0xCBF29CE484222325); /* FNV-1a */
    for (uint32_t i = 0; i < id_bytes; i++) {
        hash = (hash ^ (uint8_t)id[i]) * UINT64_C(0x100000001B3);
    }
    return lead_key_of_split(named(mixed(hash ^ mixed((uint64_t)round))), split);
}

uint64_t lead_key_of_split(uint64_t key, uint32_t split) {
    return split == SHMBUS_SPLIT_TRAIN ? key : named(mixed(key ^ split));
}

static uint64_t word_at(const struct segment *segment, uint32_t row) {
    /* SYNC: group-admitted. */
    return ACQUIRE(segment->lead->rows[row]);
}

static bool swap(struct segment *segment, uint32_t row, uint64_t from, uint64_t to) {
    /* SYNC: group-admitted. */
    return atomic_compare_exchange_strong_explicit(&segment->lead->rows[row], &from, to,
                                                   memory_order_acq_rel, memory_order_acquire);
}

/* Used rows lie below the current or an earlier `limit`: a bound in versions may have shrunk. */
static uint32_t rows_of(const struct segment *segment) {
    const struct lead_table *lead = segment->lead;
    if (lead->max_versions != 0) {
        return SHMBUS_LEAD_ROWS;
    }
    return lead->max_groups < SHMBUS_LEAD_ROWS ? lead->max_groups : SHMBUS_LEAD_ROWS;
}

/* The search starts at the hashed row: a sibling finds its group at once. */
static uint32_t home_of(uint64_t key, uint32_t rows) {
    return rows == 0 ? 0 : (uint32_t)((key >> SLOT_BITS) % rows);
}

uint32_t lead_waiters(uint64_t key) {
    return SPACE_FREED << (1 + (key >> SLOT_BITS) % 31);
}

enum lead_verdict lead_admit(struct segment *segment, uint64_t key, uint32_t slot,
                             uint32_t siblings) {
    uint32_t rows = rows_of(segment);
    for (;;) {
        uint32_t held = 0, room = SHMBUS_LEAD_ROWS;
        uint32_t row = home_of(key, rows);
        for (uint32_t i = 0; i < rows; i++, row = row + 1 < rows ? row + 1 : 0) {
            uint64_t word = word_at(segment, row);
            if ((word & ~SLOT_MASK) == key) {
                return LEAD_KNOWN;
            }
            held += word != 0;
            room = word == 0 && room == SHMBUS_LEAD_ROWS ? row : room;
        }
        uint32_t limit = RELAXED(segment->lead->limit);
        if (room == SHMBUS_LEAD_ROWS || held >= limit) {
            return LEAD_FULL;
        }
        if (swap(segment, room, 0, key | (slot + 1))) {
            FAILPOINT("lead-claimed");
            bell_ring_for(&segment->header->space_bell, lead_waiters(key), siblings);
            return LEAD_CLAIMED;
        }
    }
}

bool lead_knows(const struct segment *segment, uint64_t key) {
    uint32_t rows = rows_of(segment);
    for (uint32_t row = 0; row < rows; row++) {
        if ((word_at(segment, row) & ~SLOT_MASK) == key) {
            return true;
        }
    }
    return false;
}

/* Swaps a group's word from `from` to `to`; false if no row holds `from`. */
static bool change(struct segment *segment, uint64_t key, uint64_t from, uint64_t to) {
    uint32_t rows = rows_of(segment);
    uint32_t row = home_of(key, rows);
    for (uint32_t i = 0; i < rows; i++, row = row + 1 < rows ? row + 1 : 0) {
        if (word_at(segment, row) == from && swap(segment, row, from, to)) {
            return true;
        }
    }
    return false;
}

/* Wakes a waiting put and a worker for each group that may begin now. */
static void tell(struct segment *segment, uint32_t groups) {
    bell_ring_for(&segment->header->space_bell, SPACE_ADMITS, groups);
    bell_ring_for(&segment->requests.lane->work, WORK_IDLE, groups);
}

void lead_settle(struct segment *segment, uint64_t key, uint32_t slot) {
    FAILPOINT("lead-settling");
    change(segment, key, key | (slot + 1), key);
}

void lead_withdraw(struct segment *segment, uint64_t key, uint32_t slot) {
    if (change(segment, key, key | (slot + 1), 0)) {
        tell(segment, 1);
    }
}

void lead_settle_all(struct segment *segment, uint32_t slot) {
    if (!lead_is_bounded(segment)) {
        return;
    }
    uint32_t rows = rows_of(segment);
    for (uint32_t row = 0; row < rows; row++) {
        uint64_t word = word_at(segment, row);
        if ((word & SLOT_MASK) == slot + 1) {
            swap(segment, row, word, word & ~SLOT_MASK);
        }
    }
}

bool lead_leave(struct segment *segment, uint64_t key) {
    /* SYNC: group-closed. The close of the group's request precedes the look at the rows. */
    bell_fence(&segment->lead->limit);
    uint32_t rows = rows_of(segment);
    uint32_t row = home_of(key, rows);
    uint32_t left = 0;
    /* Scan to the end: two siblings may have begun the group at the same time. */
    for (uint32_t i = 0; i < rows; i++, row = row + 1 < rows ? row + 1 : 0) {
        uint64_t word = word_at(segment, row);
        if ((word & ~SLOT_MASK) == key && swap(segment, row, word, 0)) {
            left++;
        }
    }
    tell(segment, left);
    return left > 0;
}

uint64_t lead_settled(const struct segment *segment, uint32_t row) {
    uint64_t word = row < rows_of(segment) ? word_at(segment, row) : 0;
    return (word & SLOT_MASK) == 0 ? word : 0;
}

void lead_free(struct segment *segment, uint32_t row, uint64_t word) {
    if (word != 0 && swap(segment, row, word, 0)) {
        tell(segment, 1);
    }
}

uint32_t lead_find_settled(const struct segment *segment, uint64_t key, uint32_t row) {
    uint32_t rows = rows_of(segment);
    while (row < rows && word_at(segment, row) != key) {
        row++;
    }
    return row < rows ? row : SHMBUS_LEAD_ROWS;
}

static uint64_t less(uint64_t from, uint64_t what) {
    return from > what ? from - what : 0;
}

/* AReaL's capacity in groups: (versions + 1) * groups a version, less the groups already taken in
 * this version. Never 0, to serve a version that needs more groups than the last. */
static uint64_t bound_in_versions(const struct lead_table *lead, uint64_t leased) {
    uint64_t ended = less(lead->ended, lead->ended_before);
    uint64_t here = less(lead->ended + leased, lead->ended_before);
    uint64_t each = lead->a_version == 0 ? here : lead->a_version > ended ? lead->a_version : ended;
    uint64_t bound = less(lead->max_versions * each, here);
    return bound > 0 ? bound : 1;
}

/* A trainer announces its new version before it acknowledges the batch that produced the version.
 * Hence, of the groups leased at this moment, as many as one version takes were trained. The rest
 * counts as taken ahead, not towards the size of a version: otherwise a trainer that takes every
 * ready group would raise its own bound with every version. */
static void begin_version(struct lead_table *lead, int64_t version, uint64_t leased) {
    uint64_t trained = lead->a_version == 0 || leased < lead->a_version ? leased : lead->a_version;
    uint64_t until = lead->ended + trained;
    if (until > lead->ended_before) {
        lead->a_version = until - lead->ended_before;
        lead->ended_before = until;
    }
    lead->version = version;
}

void lead_follow(struct segment *segment, uint64_t leased, uint64_t ended) {
    struct lead_table *lead = segment->lead;
    if (lead->max_versions == 0) {
        return;
    }
    int64_t version = RELAXED(segment->header->policy_version);
    if (version != lead->version) {
        begin_version(lead, version, leased + ended);
    }
    lead->ended += ended;
    uint64_t bound = bound_in_versions(lead, leased);
    uint64_t most = lead->max_groups != 0 ? lead->max_groups : SHMBUS_LEAD_ROWS;
    uint32_t limit = (uint32_t)(bound < most ? bound : most);
    uint32_t before = atomic_exchange_explicit(&lead->limit, limit, memory_order_relaxed);
    tell(segment, limit > before ? limit - before : 0);
}

uint32_t lead_held(const struct segment *segment) {
    uint32_t rows = lead_is_bounded(segment) ? rows_of(segment) : 0;
    uint32_t held = 0;
    for (uint32_t row = 0; row < rows; row++) {
        held += word_at(segment, row) != 0;
    }
    return held;
}
