/* A channel in one process: mapped, checked, with a private copy of the geometry.
 *
 * Invariants: after SHARED_OK from channel_open, bounds never come from shared memory again. Slots
 * are mapped one by one, in their present length; a receiver maps them read-only. Locks live on an
 * unmapped description, and end with the process. */
#pragma once

#include "base/shared_file.h"
#include "channel/layout.h"

struct channel {
    struct shared_file file;
    uint32_t slots;
    uint64_t file_bytes;
    uint64_t slots_offset;
    uint64_t slot_stride;
    uint64_t max_bytes;
    uint64_t created_unix_ns;
    struct channel_header *header;
    struct channel_side *sides;
    struct channel_row *rows;
    struct channel_statement *statements;
    int32_t side; /* side of this process; -1: no side */
};

/* The bell rung by a side after a change. */
static inline struct bell *channel_bell(struct channel_header *header, enum channel_side_name by) {
    return by == CHANNEL_SENDER ? &header->sent_bell : &header->acked_bell;
}

/* Returns true if the numbers can make a channel. */
bool channel_fits(uint32_t slots, uint64_t max_bytes);
/* Makes a channel of a new, empty file; slots get memory later. Takes fd over on success. */
enum shared_status channel_create(struct channel *self, int fd, uint32_t slots, uint64_t max_bytes);
/* Maps a channel and checks it; read_only never writes. Takes ownership of fd on success. */
enum shared_status channel_open(struct channel *self, int fd, bool read_only);
void channel_unmap(struct channel *self);
/* Maps the first `bytes` bytes of a slot, at most slot_stride; NULL with errno. */
uint8_t *channel_map_slot(const struct channel *self, uint32_t slot, uint64_t bytes, bool writable);
/* Allocates the first `bytes` bytes of a slot: later stores cannot fail. */
enum shared_status channel_give_memory(const struct channel *self, uint32_t slot, uint64_t from,
                                        uint64_t bytes);

/* ---- The two sides: owner, life and statement.
 *
 * Invariant: the holder of a side's lock byte writes its row and statement. An OPEN side with a
 * free lock byte has died. */
enum channel_life { CHANNEL_ABSENT = 0, CHANNEL_ALIVE, CHANNEL_DEAD, CHANNEL_LEFT };

/* SHARED_HELD if another process owns the side. */
enum shared_status sides_claim(struct channel *self, enum channel_side_name side,
                                const char *label, uint32_t pid);
/* Marks a voluntary end of this side, and releases the lock. */
void sides_leave(struct channel *self, const char *reason);
enum channel_life sides_life(const struct channel *self, enum channel_side_name side);

/* At most CHANNEL_STATEMENT_BYTES. */
void sides_state(struct channel *self, const uint8_t *data, uint32_t bytes);
uint64_t sides_stated(const struct channel *self, enum channel_side_name side);
/* Copies a complete statement and its version; SHARED_NOTHING without a statement. */
enum shared_status sides_statement(const struct channel *self, enum channel_side_name side,
                                    uint8_t *data, uint32_t *bytes, uint64_t *version);

/* ---- Sending, receiving and acknowledging: the queue of a channel.
 *
 * Invariants: acked <= sent <= acked + slots. Only the sender stores `sent`, only the receiver
 * `acked`, by one store each: after a death at any instruction a message is either sent or not, and
 * either acknowledged or not. Writes to a slot happen only while no message in [acked, sent)
 * occupies the slot. */
struct channel_counts {
    uint64_t sent;
    uint64_t acked;
    int64_t step_base;
};

/* SHARED_DAMAGED if the counts contradict each other. */
enum shared_status messages_counts(const struct channel *self, struct channel_counts *counts);

/* For the sender: the slot of the next message, with memory; SHARED_NOTHING without a free slot. */
enum shared_status messages_begin(struct channel *self, uint64_t bytes, uint64_t meta_bytes,
                                   uint32_t *slot);
/* For the sender: publishes the slot's contents. `slot_at`: the slot's mapping, NULL without bytes
 * and meta. */
enum shared_status messages_send(struct channel *self, enum channel_kind kind, uint64_t bytes,
                                  uint8_t *slot_at, const uint8_t *meta, uint64_t meta_bytes,
                                  const char *reason);
/* For the receiver: a checked copy of the oldest message's row; SHARED_NOTHING without a
 * message. */
enum shared_status messages_peek(const struct channel *self, struct channel_row *row);
/* For the receiver: frees the message's slot for writes. */
void messages_ack(struct channel *self);
/* For the sender: withdraws messages under way and continues with `step`; SHARED_HELD by a
 * receiver. */
enum shared_status messages_begin_at(struct channel *self, int64_t step);
