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
/* Makes a channel of a new, empty file, of numbers that fit; slots get memory with their first
 * message. Takes fd over when it succeeds. */
enum shared_status channel_create(struct channel *self, int fd, uint32_t slots, uint64_t max_bytes);
/* Maps a channel and checks it. read_only: fd was opened so, and nothing is ever written. Takes fd
 * over when it succeeds. */
enum shared_status channel_open(struct channel *self, int fd, bool read_only);
void channel_unmap(struct channel *self);
/* The first `bytes` of a slot, which are at most slot_stride; NULL with errno. */
uint8_t *channel_map_slot(const struct channel *self, uint32_t slot, uint64_t bytes, bool writable);
/* Memory for the first `bytes` of a slot, so that no store into them can fail later. */
enum shared_status channel_give_memory(const struct channel *self, uint32_t slot, uint64_t from,
                                        uint64_t bytes);

#endif
