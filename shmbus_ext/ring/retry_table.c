/* Rows of wanted samples (see ring/retry_table.h). */
#include "retry_table.h"

#include <string.h>

#include "checksum.h"
#include "failpoints.h"

#define CRC_AT offsetof(struct wanted_row, number)
#define CRC_HEAD_BYTES (offsetof(struct wanted_row, crc) - CRC_AT)
#define CRC_TEXT_BYTES (SHMBUS_WANTED_ID_BYTES + SHMBUS_WANTED_REASON_BYTES)

static uint32_t row_crc(const struct wanted_row *row) {
    uint32_t crc = shmbus_crc32c(0, (const uint8_t *)row + CRC_AT, CRC_HEAD_BYTES);
    return shmbus_crc32c(crc, row->id, CRC_TEXT_BYTES);
}

void wanted_publish(struct segment *segment, uint32_t at, const struct wanted *request) {
    struct wanted_row *row = &segment->wanted[at];
    wanted_withdraw(segment, at);
    struct wanted_row fresh;
    memset(&fresh, 0, sizeof fresh);
    fresh.number = request->number;
    fresh.epoch = request->epoch;
    fresh.asked_ns = request->asked_ns;
    fresh.group_size = request->group_size;
    fresh.index = request->index;
    fresh.attempt = request->attempt;
    fresh.id_bytes = request->id_bytes;
    fresh.reason_bytes = request->reason_bytes;
    memcpy(fresh.id, request->id, request->id_bytes);
    memcpy(fresh.reason, request->reason, request->reason_bytes);
    fresh.crc = row_crc(&fresh);
    memcpy((uint8_t *)row + CRC_AT, (const uint8_t *)&fresh + CRC_AT, sizeof fresh - CRC_AT);
    FAILPOINT("want-written");
    /* SYNC: sample-wanted. The row is whole before it can be claimed. */
    atomic_store_explicit(&row->claim, SHMBUS_WANTED_FREE, memory_order_release);
    FAILPOINT("want-published");
}

void wanted_withdraw(struct segment *segment, uint32_t at) {
    struct wanted_row *row = &segment->wanted[at];
    atomic_store_explicit(&row->claim, SHMBUS_WANTED_BUSY, memory_order_relaxed);
#if !defined(__SANITIZE_THREAD__) /* which knows no fences */
    /* SYNC: sample-wanted. Who sees anything of what is written now can no longer claim the row. */
    atomic_thread_fence(memory_order_release);
#endif
    row->number = 0;
    FAILPOINT("want-busy");
}

bool wanted_read(const struct segment *segment, uint32_t at, struct wanted *copy) {
    const struct wanted_row *row = &segment->wanted[at];
    struct wanted_row own;
    /* SYNC: sample-wanted. */
    uint64_t claim = atomic_load_explicit(&row->claim, memory_order_acquire);
    if (claim == SHMBUS_WANTED_BUSY) {
        return false;
    }
    memcpy((uint8_t *)&own + CRC_AT, (const uint8_t *)row + CRC_AT, sizeof own - CRC_AT);
    if (own.number == 0 || own.crc != row_crc(&own) || own.id_bytes == 0 ||
        own.id_bytes > SHMBUS_MAX_ID_BYTES || own.reason_bytes > SHMBUS_WANTED_REASON_BYTES ||
        own.group_size > SHMBUS_MAX_GROUP_SIZE || own.index >= SHMBUS_MAX_GROUP_SIZE) {
        return false;
    }
    copy->number = own.number;
    copy->epoch = own.epoch;
    copy->asked_ns = own.asked_ns;
    copy->claimant = claim;
    copy->group_size = own.group_size;
    copy->index = own.index;
    copy->attempt = own.attempt;
    copy->id_bytes = own.id_bytes;
    copy->reason_bytes = own.reason_bytes;
    memcpy(copy->id, own.id, sizeof copy->id);
    memcpy(copy->reason, own.reason, sizeof copy->reason);
    return true;
}

bool wanted_claim(struct segment *segment, uint32_t at, uint64_t number, uint64_t producer_id) {
    struct wanted_row *row = &segment->wanted[at];
    uint64_t expected = SHMBUS_WANTED_FREE;
    /* SYNC: sample-wanted. */
    if (!atomic_compare_exchange_strong_explicit(&row->claim, &expected, producer_id + 1,
                                                 memory_order_acq_rel, memory_order_relaxed)) {
        return false;
    }
    FAILPOINT("want-claimed");
    struct wanted now;
    if (wanted_read(segment, at, &now) && now.number == number) {
        return true;
    }
    /* Another request has the row since it was looked at. */
    wanted_unclaim(segment, at, producer_id);
    return false;
}

bool wanted_unclaim(struct segment *segment, uint32_t at, uint64_t producer_id) {
    uint64_t expected = producer_id + 1;
    FAILPOINT("want-leaving");
    return atomic_compare_exchange_strong_explicit(&segment->wanted[at].claim, &expected,
                                                   SHMBUS_WANTED_FREE, memory_order_acq_rel,
                                                   memory_order_relaxed);
}
