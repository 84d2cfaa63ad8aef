/* The entries of retry_table.h. */
#include "retry_table.h"

#include "base/checksum.h"
#include "base/failpoints.h"

#define CRC_AT offsetof(struct retry_entry, number)
#define CRC_HEAD_BYTES (offsetof(struct retry_entry, crc) - CRC_AT)
#define CRC_TEXT_BYTES (SHMBUS_RETRY_ID_BYTES + SHMBUS_RETRY_REASON_BYTES)

static uint32_t entry_crc(const struct retry_entry *entry) {
    uint32_t crc = shmbus_crc32c(0, (const uint8_t *)entry + CRC_AT, CRC_HEAD_BYTES);
    return shmbus_crc32c(crc, entry->id, CRC_TEXT_BYTES);
}

void retry_publish(struct segment *segment, uint32_t at, const struct retry_entry *request) {
    struct retry_entry *entry = &segment->retries[at];
    retry_withdraw(segment, at);
    uint32_t crc = entry_crc(request);
    memcpy((uint8_t *)entry + CRC_AT, (const uint8_t *)request + CRC_AT, sizeof *entry - CRC_AT);
    entry->crc = crc;
    FAILPOINT("want-written");
    /* SYNC: retry-requested. The entry is complete before a claim can succeed. */
    SET_RELEASE(entry->claim, SHMBUS_RETRY_FREE);
    FAILPOINT("want-published");
}

void retry_withdraw(struct segment *segment, uint32_t at) {
    struct retry_entry *entry = &segment->retries[at];
    SET_RELAXED(entry->claim, SHMBUS_RETRY_BUSY);
#if !defined(__SANITIZE_THREAD__) /* no fences in TSan */
    /* SYNC: retry-requested. Readers of later writes cannot claim any more. */
    atomic_thread_fence(memory_order_release);
#endif
    entry->number = 0;
    FAILPOINT("want-busy");
}

bool retry_read(const struct segment *segment, uint32_t at, struct retry_entry *copy) {
    const struct retry_entry *entry = &segment->retries[at];
    /* SYNC: retry-requested. */
    uint64_t claim = ACQUIRE(entry->claim);
    if (claim == SHMBUS_RETRY_BUSY) {
        return false;
    }
    memcpy((uint8_t *)copy + CRC_AT, (const uint8_t *)entry + CRC_AT, sizeof *copy - CRC_AT);
    SET_RELAXED(copy->claim, claim & ~SHMBUS_RETRY_ANSWERED);
    return copy->number != 0 && copy->crc == entry_crc(copy) && copy->id_bytes != 0 &&
           copy->id_bytes <= SHMBUS_MAX_ID_BYTES &&
           copy->reason_bytes <= SHMBUS_RETRY_REASON_BYTES &&
           copy->group_size <= SHMBUS_MAX_GROUP_SIZE && copy->index < SHMBUS_MAX_GROUP_SIZE &&
           copy->need <= copy->group_size && copy->split < SHMBUS_MAX_SPLITS;
}

static bool swap(struct segment *segment, uint32_t at, uint64_t from, uint64_t to) {
    /* SYNC: retry-requested. */
    return EXCHANGE(segment->retries[at].claim, from, to, memory_order_acq_rel);
}

/* Returns true between a producer's intent of a commit and its count. */
static bool is_committing(const struct segment *segment, uint64_t producer_id) {
    for (uint32_t i = 0; i < segment->max_producers; i++) {
        const struct producer_slot *slot = &segment->slots[i];
        if (ACQUIRE(slot->producer_id) == producer_id) {
            uint64_t counted = ACQUIRE(slot->committed);
            return ACQUIRE(slot->state) == SHMBUS_SLOT_ACTIVE &&
                   ACQUIRE(slot->committing) > counted;
        }
    }
    return false;
}

enum retry_taken retry_take_back(struct segment *segment, uint32_t at) {
    uint64_t claim;
    do {
        claim = ACQUIRE(segment->retries[at].claim);
        if (claim != SHMBUS_RETRY_BUSY && (claim & SHMBUS_RETRY_ANSWERED) != 0) {
            bool commits = is_committing(segment, (claim & ~SHMBUS_RETRY_ANSWERED) - 1);
            return commits ? RETRY_COMMITTING : RETRY_ANSWERED;
        }
    } while (!swap(segment, at, claim, SHMBUS_RETRY_BUSY));
    return RETRY_TAKEN_BACK;
}

bool retry_claim(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id,
                 struct retry_entry *copy) {
    if (!swap(segment, at, SHMBUS_RETRY_FREE, producer_id + 1)) {
        return false;
    }
    FAILPOINT("want-claimed");
    if (retry_read(segment, at, copy) && copy->number == number) {
        return true;
    }
        /* Since the read, the entry received a new request. */
    swap(segment, at, producer_id + 1, SHMBUS_RETRY_FREE);
    return false;
}

bool retry_is_held(const struct segment *segment, uint32_t at, uint64_t number,
                   uint64_t producer_id) {
    const struct retry_entry *entry = &segment->retries[at];
    /* SYNC: retry-requested. Only this producer frees its claim: the number belongs to the
     * claim. */
    return ACQUIRE(entry->claim) == producer_id + 1 && entry->number == number;
}

bool retry_unclaim(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id) {
    FAILPOINT("want-leaving");
    return retry_is_held(segment, at, number, producer_id) &&
           swap(segment, at, producer_id + 1, SHMBUS_RETRY_FREE);
}

bool retry_answer(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id) {
    FAILPOINT("want-answering");
    if (!retry_is_held(segment, at, number, producer_id) ||
        !swap(segment, at, producer_id + 1, SHMBUS_RETRY_ANSWERED | (producer_id + 1))) {
        return false;
    }
    FAILPOINT("want-answered");
    return true;
}
