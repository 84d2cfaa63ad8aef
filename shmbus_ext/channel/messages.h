/* Sending, receiving and acknowledging: the queue of a channel.
 *
 * Invariants: acked <= sent <= acked + slots. Only the sender stores `sent`, only the receiver
 * `acked`; each is one store, so a death at any instruction leaves a message either sent or not, and
 * either acknowledged or not. A slot is written only while no message in [acked, sent) lies in it. */
#ifndef SHMBUS_CHANNEL_MESSAGES_H
#define SHMBUS_CHANNEL_MESSAGES_H

#include "channel/channel.h"

struct channel_counts {
    uint64_t sent;
    uint64_t acked;
    int64_t step_base;
};

/* SHARED_DAMAGED where they contradict each other. */
enum shared_status messages_counts(const struct channel *self, struct channel_counts *counts);

/* Sender: the slot of the next message, with memory for it; SHARED_NOTHING while none is free. */
enum shared_status messages_begin(struct channel *self, uint64_t bytes, uint64_t meta_bytes,
                                   uint32_t *slot);
/* Sender: publishes what lies in the slot. `slot_at` is its mapping, NULL without bytes and meta. */
enum shared_status messages_send(struct channel *self, enum channel_kind kind, uint64_t bytes,
                                  uint8_t *slot_at, const uint8_t *meta, uint64_t meta_bytes,
                                  const char *reason);
/* Receiver: a checked copy of the row of the oldest message; SHARED_NOTHING where there is none. */
enum shared_status messages_peek(const struct channel *self, struct channel_row *row);
/* Receiver: the slot of that message may be written again. */
void messages_ack(struct channel *self);
/* Sender: the next message is `step`, and those on their way are withdrawn. SHARED_HELD where a
 * receiver lives and some are. */
enum shared_status messages_begin_at(struct channel *self, int64_t step);

#endif
