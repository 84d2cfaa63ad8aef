/* Taking, leaving and describing a side (see channel.h). */
#define _GNU_SOURCE
#include "channel/channel.h"

#include <string.h>

#include "base/checksum.h"
#include "base/failpoints.h"
#include "base/file_lock.h"

/* A statement changes a few times in a channel's life. */
#define STATEMENT_TRIES 64

static void put_text(char *target, size_t room, const char *text) {
    size_t length = strnlen(text, room - 1);
    memset(target, 0, room);
    memcpy(target, text, length);
}

enum shared_status sides_claim(struct channel *self, enum channel_side_name side,
                                const char *label, uint32_t pid) {
    enum lock_status lock = file_lock_take(self->file.fd, CHANNEL_LOCK_SIDE + side);
    if (lock != LOCK_TAKEN) {
        return lock == LOCK_ERROR ? SHARED_SYSTEM_ERROR : SHARED_HELD;
    }
    self->side = (int32_t)side;
    struct channel_side *row = &self->sides[side];
    FAILPOINT("channel-locked");
    put_text(row->label, sizeof row->label, label);
    memset(row->reason, 0, sizeof row->reason);
    SET_RELAXED(row->pid, pid);
    atomic_fetch_add_explicit(&row->claims, 1, memory_order_relaxed);
    /* SYNC: channel-side. SYNC: channel-claim. The count of this claim precedes its state. */
    SET_RELEASE(row->state, CHANNEL_OPEN);
    FAILPOINT("channel-claimed");
    bell_ring(channel_bell(self->header, side), BELL_ALL);
    return SHARED_OK;
}

void sides_leave(struct channel *self, const char *reason) {
    if (self->side < 0) {
        return;
    }
    enum channel_side_name side = (enum channel_side_name)self->side;
    struct channel_side *row = &self->sides[side];
    put_text(row->reason, sizeof row->reason, reason);
    /* SYNC: channel-side. */
    SET_RELEASE(row->state, CHANNEL_CLOSED);
    FAILPOINT("channel-left");
    file_lock_drop(self->file.fd, CHANNEL_LOCK_SIDE + side);
    bell_ring(channel_bell(self->header, side), BELL_ALL);
    self->side = -1;
}

enum channel_life sides_life(const struct channel *self, enum channel_side_name side) {
    const struct channel_side *row = &self->sides[side];
    if (self->side == (int32_t)side) {
        return CHANNEL_ALIVE; /* a description does not find its own locks */
    }
    for (;;) {
        /* SYNC: channel-claim. Without the count, a new owner between both looks would seem
         * dead. */
        uint64_t claims = ACQUIRE(row->claims);
        if (file_lock_probe(self->file.fd, CHANNEL_LOCK_SIDE + side) == LOCK_HELD_ELSEWHERE) {
            return CHANNEL_ALIVE;
        }
        /* SYNC: channel-side. After the lock: a leaving owner stores its state before the
         * unlock. */
        uint32_t state = ACQUIRE(row->state);
        if (RELAXED(row->claims) == claims) {
            return state == CHANNEL_NEVER    ? CHANNEL_ABSENT
                   : state == CHANNEL_CLOSED ? CHANNEL_LEFT
                                             : CHANNEL_DEAD;
        }
    }
}

void sides_state(struct channel *self, const uint8_t *data, uint32_t bytes) {
    enum channel_side_name side = (enum channel_side_name)self->side;
    struct channel_statement *at = &self->statements[side];
    uint64_t version = RELAXED(at->version) | 1;
    SET_RELAXED(at->version, version);
    /* SYNC: channel-statement. The odd version comes before the bytes. */
    atomic_thread_fence(memory_order_release);
    FAILPOINT("channel-stating");
    at->bytes = bytes;
    at->crc = shmbus_crc32c(0, data, bytes);
    memcpy(at->data, data, bytes);
    SET_RELEASE(at->version, version + 1);
    FAILPOINT("channel-stated");
    bell_ring(channel_bell(self->header, side), BELL_ALL);
}

uint64_t sides_stated(const struct channel *self, enum channel_side_name side) {
    return ACQUIRE(self->statements[side].version);
}

enum shared_status sides_statement(const struct channel *self, enum channel_side_name side,
                                    uint8_t *data, uint32_t *bytes, uint64_t *version) {
    const struct channel_statement *at = &self->statements[side];
    for (int i = 0; i < STATEMENT_TRIES; i++) {
        /* SYNC: channel-statement. */
        uint64_t before = sides_stated(self, side);
        if (before == 0 || (before & 1) != 0) {
            return SHARED_NOTHING; /* the writer rings after the complete statement */
        }
        uint32_t length = at->bytes;
        uint32_t crc = at->crc;
        if (length <= CHANNEL_STATEMENT_BYTES) {
            memcpy(data, at->data, length);
        }
        atomic_thread_fence(memory_order_acquire);
        if (RELAXED(at->version) != before) {
            continue;
        }
        if (length > CHANNEL_STATEMENT_BYTES || shmbus_crc32c(0, data, length) != crc) {
            return SHARED_DAMAGED;
        }
        *bytes = length;
        *version = before;
        return SHARED_OK;
    }
    return SHARED_NOTHING;
}
