/* How messages pass (see channel.h). */
#define _GNU_SOURCE
#include "channel/channel.h"

#include <string.h>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/failpoints.h"
#include "base/file_lock.h"

static uint32_t row_crc(const struct channel_row *row) {
    return shmbus_crc32c(0, (const uint8_t *)row + CHANNEL_ROW_CRC_FROM,
                         sizeof *row - CHANNEL_ROW_CRC_FROM);
}

static enum shared_status check_counts(const struct channel *self,
                                        const struct channel_counts *counts) {
    bool possible = counts->acked <= counts->sent && counts->sent - counts->acked <= self->slots;
    return possible ? SHARED_OK : SHARED_DAMAGED;
}

enum shared_status messages_counts(const struct channel *self, struct channel_counts *counts) {
    /* The lower count first: a change between the two looks increases the difference, by at most
     * the messages sent meanwhile; the receiver's own look cannot be overtaken. */
    if (self->side == CHANNEL_RECEIVER) {
        counts->acked = RELAXED(self->header->acked);
        /* SYNC: channel-sent. */
        counts->sent = ACQUIRE(self->header->sent);
    } else {
        counts->sent = ACQUIRE(self->header->sent);
        /* SYNC: channel-acked. */
        counts->acked = ACQUIRE(self->header->acked);
    }
    counts->step_base = RELAXED(self->header->step_base);
    return self->side < 0 ? SHARED_OK : check_counts(self, counts);
}

enum shared_status messages_begin(struct channel *self, uint64_t bytes, uint64_t meta_bytes,
                                   uint32_t *slot) {
    struct channel_counts counts;
    enum shared_status status = messages_counts(self, &counts);
    if (status != SHARED_OK) {
        return status;
    }
    if (counts.sent - counts.acked == self->slots) {
        return SHARED_NOTHING;
    }
    *slot = (uint32_t)(counts.sent % self->slots);
    struct channel_row *row = &self->rows[*slot];
    uint64_t needed = channel_align_up(channel_meta_at(bytes) + meta_bytes, CHANNEL_PAGE);
    uint64_t room = RELAXED(row->room);
    FAILPOINT("channel-begun");
    if (needed <= room) {
        return SHARED_OK;
    }
    status = channel_give_memory(self, *slot, room < self->slot_stride ? room : 0, needed);
    if (status == SHARED_OK) {
        FAILPOINT("channel-grown");
        SET_RELAXED(row->room, needed);
        atomic_fetch_add_explicit(&self->header->growths, 1, memory_order_relaxed);
    }
    return status;
}

enum shared_status messages_send(struct channel *self, enum channel_kind kind, uint64_t bytes,
                                  uint8_t *slot_at, const uint8_t *meta, uint64_t meta_bytes,
                                  const char *reason) {
    struct channel_counts counts;
    enum shared_status status = messages_counts(self, &counts);
    if (status != SHARED_OK) {
        return status;
    }
    if (counts.sent - counts.acked == self->slots) {
        return SHARED_NOTHING;
    }
    FAILPOINT("channel-written");
    if (meta_bytes > 0) {
        memcpy(slot_at + channel_meta_at(bytes), meta, meta_bytes);
    }
    struct channel_row *row = &self->rows[counts.sent % self->slots];
    row->kind = kind;
    row->sequence = counts.sent;
    row->step = counts.step_base + (int64_t)counts.sent;
    row->bytes = bytes;
    row->meta_bytes = meta_bytes;
    row->sent_unix_ns = clock_realtime_ns();
    row->meta_crc = shmbus_crc32c(0, meta, meta_bytes);
    memset(row->reason, 0, sizeof row->reason);
    memcpy(row->reason, reason, strnlen(reason, sizeof row->reason - 1));
    row->crc = row_crc(row);
    FAILPOINT("channel-described");
    /* SYNC: channel-sent. Payload, meta and row come before the count that covers them. */
    SET_RELEASE(self->header->sent, counts.sent + 1);
    FAILPOINT("channel-sent");
    bell_ring(channel_bell(self->header, CHANNEL_SENDER), BELL_ALL);
    return SHARED_OK;
}

enum shared_status messages_peek(const struct channel *self, struct channel_row *row) {
    struct channel_counts counts;
    enum shared_status status = messages_counts(self, &counts);
    if (status != SHARED_OK) {
        return status;
    }
    if (counts.sent == counts.acked) {
        return SHARED_NOTHING;
    }
    FAILPOINT("channel-seen");
    /* Check and use the copy, never the shared original. */
    memcpy(row, &self->rows[counts.acked % self->slots], sizeof *row);
    bool whole = row->crc == row_crc(row) && row->sequence == counts.acked &&
                 row->step == counts.step_base + (int64_t)counts.acked &&
                 row->kind >= CHANNEL_STEP && row->kind < CHANNEL_KINDS &&
                 row->bytes <= self->max_bytes && row->meta_bytes <= CHANNEL_MAX_META_BYTES &&
                 channel_meta_at(row->bytes) + row->meta_bytes <= self->slot_stride;
    return whole ? SHARED_OK : SHARED_DAMAGED;
}

void messages_ack(struct channel *self) {
    uint64_t acked = RELAXED(self->header->acked);
    FAILPOINT("channel-acking");
    /* SYNC: channel-acked. Reads of the slot precede the count that frees the slot. */
    SET_RELEASE(self->header->acked, acked + 1);
    FAILPOINT("channel-acked");
    bell_ring(channel_bell(self->header, CHANNEL_RECEIVER), BELL_ALL);
}

enum shared_status messages_begin_at(struct channel *self, int64_t step) {
    struct channel_counts counts;
    const int64_t receiver = CHANNEL_LOCK_SIDE + CHANNEL_RECEIVER;
    enum shared_status status = messages_counts(self, &counts);
    if (status != SHARED_OK) {
        return status;
    }
    /* A receiver reads base-dependent values only with a message under way. */
    bool withdraw = counts.sent != counts.acked;
    if (withdraw) {
        enum lock_status lock = file_lock_take(self->file.fd, receiver);
        if (lock != LOCK_TAKEN) {
            return lock == LOCK_ERROR ? SHARED_SYSTEM_ERROR : SHARED_HELD;
        }
        /* Load again: the receiver may have acknowledged messages before it left. */
        counts.acked = ACQUIRE(self->header->acked);
        SET_RELEASE(self->header->sent, counts.acked);
        counts.sent = counts.acked;
        FAILPOINT("channel-withdrawn");
    }
    SET_RELAXED(self->header->step_base, step - (int64_t)counts.sent);
    if (withdraw) {
        file_lock_drop(self->file.fd, receiver);
    }
    return SHARED_OK;
}
