/* Allocating, opening and mapping a channel: all its system calls but futexes and file locks. */
#define _GNU_SOURCE
#include "channel/channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checksum.h"
#include "base/clock.h"

bool channel_fits(uint32_t slots, uint64_t max_bytes) {
    return slots >= 1 && slots <= CHANNEL_MAX_SLOTS && max_bytes >= 1 &&
           max_bytes <= CHANNEL_MAX_BYTES;
}

static uint32_t geometry_crc(const struct channel_header *header) {
    return shmbus_crc32c(0, (const uint8_t *)header + CHANNEL_GEOMETRY_FROM,
                         CHANNEL_GEOMETRY_TO - CHANNEL_GEOMETRY_FROM);
}

static void plan(struct channel *self, uint32_t slots, uint64_t max_bytes) {
    self->slots = slots;
    self->max_bytes = max_bytes;
    self->slots_offset = CHANNEL_TABLES_BYTES;
    self->slot_stride = channel_align_up(max_bytes, CHANNEL_PAGE);
    self->file_bytes = self->slots_offset + slots * self->slot_stride;
}

static void begin_empty(struct channel *self, int fd) {
    memset(self, 0, sizeof *self);
    self->fd = fd;
    self->side = -1;
}

/* Through a description of its own. A forked child gets no mapping: it has no part in the channel. */
static uint8_t *map_part(int fd, uint64_t from, uint64_t bytes, bool writable) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int own = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (own < 0) {
        return NULL;
    }
    int how = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *at = mmap(NULL, bytes, how, MAP_SHARED, own, (off_t)from);
    int why = errno;
    close(own);
    errno = why;
    if (at == MAP_FAILED) {
        return NULL;
    }
    (void)madvise(at, bytes, MADV_DONTFORK);
    return at;
}

static enum channel_status map_control(struct channel *self) {
    self->control = map_part(self->fd, 0, CHANNEL_TABLES_BYTES, !self->read_only);
    if (self->control == NULL) {
        return CHANNEL_SYSTEM_ERROR;
    }
    self->header = (struct channel_header *)self->control;
    self->sides = (struct channel_side *)(self->control + CHANNEL_SIDES_OFFSET);
    self->rows = (struct channel_row *)(self->control + CHANNEL_ROWS_OFFSET);
    self->statements = (struct channel_statement *)(self->control + CHANNEL_STATEMENTS_OFFSET);
    return CHANNEL_OK;
}

static enum channel_status allocate(int fd, uint64_t from, uint64_t bytes) {
    int why;
    do {
        why = posix_fallocate(fd, (off_t)from, (off_t)bytes);
    } while (why == EINTR);
    errno = why;
    return why == 0 ? CHANNEL_OK : why == ENOSPC ? CHANNEL_NO_SPACE : CHANNEL_SYSTEM_ERROR;
}

/* A companion in use: whoever removes an abandoned one finds this lock. */
static enum channel_status share_file(int fd) {
    if (flock(fd, LOCK_SH | LOCK_NB) == 0) {
        return CHANNEL_OK;
    }
    return errno == EWOULDBLOCK ? CHANNEL_UNFINISHED : CHANNEL_SYSTEM_ERROR;
}

static void write_header(struct channel *self) {
    struct channel_header *header = self->header;
    self->created_unix_ns = clock_realtime_ns();
    header->layout_version = CHANNEL_LAYOUT_VERSION;
    header->slots = self->slots;
    header->file_bytes = self->file_bytes;
    header->slots_offset = self->slots_offset;
    header->slot_stride = self->slot_stride;
    header->max_bytes = self->max_bytes;
    header->created_unix_ns = self->created_unix_ns;
    header->geometry_crc = geometry_crc(header);
    /* SYNC: channel-created. The magic says that all of the header is there. */
    atomic_store_explicit(&header->magic, CHANNEL_MAGIC, memory_order_release);
}

enum channel_status channel_create(struct channel *self, int fd, uint32_t slots,
                                   uint64_t max_bytes) {
    begin_empty(self, fd);
    plan(self, slots, max_bytes);
    /* First of all, so that no cleanup takes an unfinished channel for an abandoned one. */
    enum channel_status status = share_file(fd);
    if (status == CHANNEL_OK && ftruncate(fd, (off_t)self->file_bytes) != 0) {
        status = CHANNEL_SYSTEM_ERROR;
    }
    if (status == CHANNEL_OK) {
        status = allocate(fd, 0, CHANNEL_TABLES_BYTES);
    }
    if (status == CHANNEL_OK) {
        status = map_control(self);
    }
    if (status == CHANNEL_OK) {
        write_header(self);
    }
    return status;
}

static enum channel_status check_header(struct channel *self, uint64_t found_bytes) {
    /* SYNC: channel-created. */
    uint64_t magic = atomic_load_explicit(&self->header->magic, memory_order_acquire);
    if (magic != CHANNEL_MAGIC) {
        return magic == 0 ? CHANNEL_UNFINISHED : CHANNEL_BAD_MAGIC;
    }
    self->found_version = self->header->layout_version;
    if (self->found_version != CHANNEL_LAYOUT_VERSION) {
        return CHANNEL_BAD_VERSION;
    }
    /* The copy is checked, not the shared original, which may change between two looks. */
    struct channel_header copy;
    memcpy(&copy, self->header, sizeof copy);
    if (copy.geometry_crc != geometry_crc(&copy) || !channel_fits(copy.slots, copy.max_bytes)) {
        return CHANNEL_BAD_GEOMETRY;
    }
    plan(self, copy.slots, copy.max_bytes);
    self->created_unix_ns = copy.created_unix_ns;
    if (copy.file_bytes != self->file_bytes || copy.slots_offset != self->slots_offset ||
        copy.slot_stride != self->slot_stride) {
        return CHANNEL_BAD_GEOMETRY;
    }
    if (found_bytes < self->file_bytes) {
        self->found_bytes = found_bytes;
        return CHANNEL_TRUNCATED;
    }
    return CHANNEL_OK;
}

enum channel_status channel_open(struct channel *self, int fd, bool read_only) {
    struct stat found;
    begin_empty(self, fd);
    self->read_only = read_only;
    if (fstat(fd, &found) != 0) {
        return CHANNEL_SYSTEM_ERROR;
    }
    /* Who only looks keeps nothing alive. */
    enum channel_status status = read_only ? CHANNEL_OK : share_file(fd);
    if (status != CHANNEL_OK) {
        return status;
    }
    if ((uint64_t)found.st_size < CHANNEL_TABLES_BYTES) {
        self->found_bytes = (uint64_t)found.st_size;
        return found.st_size == 0 ? CHANNEL_UNFINISHED : CHANNEL_TRUNCATED;
    }
    status = map_control(self);
    return status == CHANNEL_OK ? check_header(self, (uint64_t)found.st_size) : status;
}

void channel_unmap(struct channel *self) {
    if (self->control != NULL) {
        munmap(self->control, CHANNEL_TABLES_BYTES);
        self->control = NULL;
    }
}

uint8_t *channel_map_slot(const struct channel *self, uint32_t slot, uint64_t bytes,
                          bool writable) {
    return map_part(self->fd, self->slots_offset + slot * self->slot_stride, bytes, writable);
}

enum channel_status channel_give_memory(const struct channel *self, uint32_t slot, uint64_t from,
                                        uint64_t bytes) {
    return allocate(self->fd, self->slots_offset + slot * self->slot_stride + from, bytes - from);
}
