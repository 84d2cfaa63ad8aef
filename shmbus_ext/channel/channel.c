/* Allocating, opening and mapping a channel: every system call except futexes and file locks. */
#define _GNU_SOURCE
#include "channel/channel.h"

#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"

static const struct shared_kind kind = {
    .magic = CHANNEL_MAGIC,
    .layout_version = CHANNEL_LAYOUT_VERSION,
    .header_bytes = sizeof(struct channel_header),
    .crc_at = CHANNEL_GEOMETRY_TO,
    .tables_bytes = CHANNEL_TABLES_BYTES,
};

bool channel_fits(uint32_t slots, uint64_t max_bytes) {
    return slots >= 1 && slots <= CHANNEL_MAX_SLOTS && max_bytes >= 1 &&
           max_bytes <= CHANNEL_MAX_BYTES;
}

static void plan(struct channel *self, uint32_t slots, uint64_t max_bytes) {
    self->slots = slots;
    self->max_bytes = max_bytes;
    self->slots_offset = CHANNEL_TABLES_BYTES;
    self->slot_stride = channel_align_up(max_bytes, CHANNEL_PAGE);
    self->file_bytes = self->slots_offset + slots * self->slot_stride;
}

static void begin_empty(struct channel *self) {
    memset(self, 0, sizeof *self);
    self->side = -1;
}

/* A forked child gets no mapping and no part in the channel. */
static void take_control(struct channel *self) {
    (void)madvise(self->file.control, CHANNEL_TABLES_BYTES, MADV_DONTFORK);
    self->header = (struct channel_header *)self->file.control;
    self->sides = (struct channel_side *)(self->file.control + CHANNEL_SIDES_OFFSET);
    self->rows = (struct channel_row *)(self->file.control + CHANNEL_ROWS_OFFSET);
    self->statements = (struct channel_statement *)(self->file.control + CHANNEL_STATEMENTS_OFFSET);
}

enum shared_status channel_create(struct channel *self, int fd, uint32_t slots,
                                  uint64_t max_bytes) {
    begin_empty(self);
    plan(self, slots, max_bytes);
    enum shared_status status =
        shared_create(&self->file, &kind, fd, self->file_bytes, CHANNEL_TABLES_BYTES);
    if (status == SHARED_OK) {
        take_control(self);
        struct channel_header *header = self->header;
        self->created_unix_ns = clock_realtime_ns();
        header->slots = self->slots;
        header->file_bytes = self->file_bytes;
        header->slots_offset = self->slots_offset;
        header->slot_stride = self->slot_stride;
        header->max_bytes = self->max_bytes;
        header->created_unix_ns = self->created_unix_ns;
        shared_publish(&kind, header);
    }
    return status;
}

enum shared_status channel_open(struct channel *self, int fd, bool read_only) {
    struct channel_header copy;
    begin_empty(self);
    enum shared_status status = shared_open(&self->file, &kind, fd, read_only, &copy);
    if (status != SHARED_OK) {
        return status;
    }
    take_control(self);
    if (!channel_fits(copy.slots, copy.max_bytes)) {
        return SHARED_BAD_GEOMETRY;
    }
    plan(self, copy.slots, copy.max_bytes);
    self->created_unix_ns = copy.created_unix_ns;
    if (copy.file_bytes != self->file_bytes || copy.slots_offset != self->slots_offset ||
        copy.slot_stride != self->slot_stride) {
        return SHARED_BAD_GEOMETRY;
    }
    return self->file.found_bytes < self->file_bytes ? SHARED_TRUNCATED : SHARED_OK;
}

void channel_unmap(struct channel *self) {
    shared_unmap(&self->file, &kind);
}

uint8_t *channel_map_slot(const struct channel *self, uint32_t slot, uint64_t bytes,
                          bool writable) {
    uint8_t *at = shared_map(self->file.fd, self->slots_offset + slot * self->slot_stride, bytes,
                             writable ? PROT_READ | PROT_WRITE : PROT_READ, !writable);
    if (at != NULL) {
        (void)madvise(at, bytes, MADV_DONTFORK);
    }
    return at;
}

enum shared_status channel_give_memory(const struct channel *self, uint32_t slot, uint64_t from,
                                       uint64_t bytes) {
    return shared_allocate(self->file.fd, self->slots_offset + slot * self->slot_stride + from,
                           bytes - from);
}
