/* A channel as one process sees it: mapped, checked, and with its own copy of the geometry.
 *
 * Invariants: after channel_open has said SHARED_OK, no bound is ever read from shared memory
 * again. Slots are mapped one by one, as long as they are; a receiver maps them read-only. Locks
 * live on a description that nothing maps, so that they end with the process. */
#ifndef SHMBUS_CHANNEL_CHANNEL_H
#define SHMBUS_CHANNEL_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

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
    int32_t side; /* that this process is; -1 for none */
};

/* What a side rings when it has done something. */
static inline struct bell *channel_bell(struct channel_header *header, enum channel_side_name by) {
    return by == CHANNEL_SENDER ? &header->sent_bell : &header->acked_bell;
}

/* Whether the numbers can make a channel. */
bool channel_fits(uint32_t slots, uint64_t max_bytes);
/* Makes a channel of a new, empty file; slots get memory later. Takes fd over on success. */
enum shared_status channel_create(struct channel *self, int fd, uint32_t slots, uint64_t max_bytes);
/* Maps a channel and checks it; nothing is written if read_only. Takes fd over on success. */
enum shared_status channel_open(struct channel *self, int fd, bool read_only);
void channel_unmap(struct channel *self);
/* The first `bytes` of a slot, which are at most slot_stride; NULL with errno. */
uint8_t *channel_map_slot(const struct channel *self, uint32_t slot, uint64_t bytes, bool writable);
/* Memory for the first `bytes` of a slot, so that no store into them can fail later. */
enum shared_status channel_give_memory(const struct channel *self, uint32_t slot, uint64_t from,
                                        uint64_t bytes);

/* ---- The two sides: who is one, whether it lives, what it states.
 *
 * Invariant: a side's row and statement are written by whoever holds its lock byte. A side that is
 * OPEN and whose byte nobody holds has died. */
enum channel_life { CHANNEL_ABSENT = 0, CHANNEL_ALIVE, CHANNEL_DEAD, CHANNEL_LEFT };

/* SHARED_HELD where another process is that side. */
enum shared_status sides_claim(struct channel *self, enum channel_side_name side,
                                const char *label, uint32_t pid);
/* Says that this side ends by its own will, and gives the lock back. */
void sides_leave(struct channel *self, const char *reason);
enum channel_life sides_life(const struct channel *self, enum channel_side_name side);

/* At most CHANNEL_STATEMENT_BYTES. */
void sides_state(struct channel *self, const uint8_t *data, uint32_t bytes);
uint64_t sides_stated(const struct channel *self, enum channel_side_name side);
/* A copy of a whole statement and its version; SHARED_NOTHING where there is none. */
enum shared_status sides_statement(const struct channel *self, enum channel_side_name side,
                                    uint8_t *data, uint32_t *bytes, uint64_t *version);

/* ---- Sending, receiving and acknowledging: the queue of a channel.
 *
 * Invariants: acked <= sent <= acked + slots. Only the sender stores `sent`, only the receiver
 * `acked`; each is one store, so a death at any instruction leaves a message either sent or not, and
 * either acknowledged or not. A slot is written only while no message in [acked, sent) lies in it. */
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
/* Sender: the next is `step`, what is on its way withdrawn; SHARED_HELD by a receiver. */
enum shared_status messages_begin_at(struct channel *self, int64_t step);

#endif
