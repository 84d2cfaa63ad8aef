/* Allocating, opening and mapping a pool: every system call except futexes and file locks. */
#define _GNU_SOURCE
#include "pool/pool.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "base/checksum.h"
#include "base/clock.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static const struct shared_kind kind = {
    .magic = POOL_MAGIC,
    .layout_version = POOL_LAYOUT_VERSION,
    .header_bytes = sizeof(struct pool_header),
    .crc_at = POOL_GEOMETRY_TO,
    .tables_bytes = POOL_TABLES_BYTES,
};

static uint64_t blocks_of(uint64_t bytes, uint64_t block_bytes) {
    return bytes / block_bytes + (bytes % block_bytes != 0);
}

static uint64_t stride_of(const struct pool_geometry *plan) {
    uint64_t digests = blocks_of(plan->slot_bytes, plan->block_bytes) * sizeof(uint32_t);
    uint64_t bytes = pool_align_up(plan->slot_bytes, POOL_PAGE) +
                     pool_align_up(plan->meta_bytes, POOL_PAGE) +
                     pool_align_up(digests, POOL_PAGE) +
                     pool_align_up(plan->patch_bytes, POOL_PAGE);
    return pool_align_up(bytes, plan->slot_bytes < POOL_HUGE_PAGE ? POOL_PAGE : POOL_HUGE_PAGE);
}

bool pool_plan(struct pool_geometry *plan) {
    bool power = (plan->block_bytes & (plan->block_bytes - 1)) == 0;
    if (plan->slots < 1 || plan->slots > plan->max_slots || plan->max_slots > POOL_MAX_SLOTS ||
        plan->slot_bytes < 1 || plan->slot_bytes > POOL_MAX_SLOT_BYTES ||
        plan->meta_bytes > POOL_MAX_META_BYTES || plan->block_bytes < POOL_MIN_BLOCK ||
        plan->block_bytes > POOL_MAX_BLOCK || !power || plan->patch_bytes > POOL_MAX_SLOT_BYTES) {
        return false;
    }
    plan->slot_stride = stride_of(plan);
    plan->slots_offset = pool_align_up(
        POOL_TABLES_BYTES, plan->slot_bytes < POOL_HUGE_PAGE ? POOL_PAGE : POOL_HUGE_PAGE);
    plan->file_bytes = plan->slots_offset + plan->max_slots * plan->slot_stride;
    return true;
}

uint32_t pool_digest_room(const struct pool *self) {
    return (uint32_t)blocks_of(self->slot_bytes, self->block_bytes);
}

static void set_pointers(struct pool *self) {
    uint8_t *at = self->file.control;
    self->header = (struct pool_header *)at;
    at += POOL_HEADER_BYTES;
    self->slot_rows = (struct slot_row *)at;
    at += POOL_MAX_SLOTS * sizeof(struct slot_row);
    self->rank_rows = (struct rank_row *)at;
    at += POOL_MAX_RANKS * sizeof(struct rank_row);
    self->reader_rows = (struct reader_row *)at;
}

static void take_geometry(struct pool *self, const struct pool_header *header) {
    self->file_bytes = header->file_bytes;
    self->slots_offset = header->slots_offset;
    self->slot_stride = header->slot_stride;
    self->slot_bytes = header->slot_bytes;
    self->meta_bytes = header->meta_bytes;
    self->block_bytes = header->block_bytes;
    self->patch_bytes = header->patch_bytes;
    self->max_slots = header->max_slots;
    self->created_unix_ns = header->created_unix_ns;
}

static enum shared_status map_slots(struct pool *self) {
    self->slots = shared_map(self->file.fd, self->slots_offset,
                             self->file_bytes - self->slots_offset, PROT_READ, false);
    return self->slots == NULL ? SHARED_SYSTEM_ERROR : SHARED_OK;
}

static bool write_header(struct pool *self, const struct pool_geometry *plan) {
    struct pool_header *header = self->header;
    header->max_slots = plan->max_slots;
    header->file_bytes = plan->file_bytes;
    header->slots_offset = plan->slots_offset;
    header->slot_stride = plan->slot_stride;
    header->slot_bytes = plan->slot_bytes;
    header->meta_bytes = plan->meta_bytes;
    header->block_bytes = plan->block_bytes;
    header->patch_bytes = plan->patch_bytes;
    header->created_unix_ns = clock_realtime_ns();
    SET_RELAXED(header->next_sequence, 1);
    SET_RELAXED(header->slots_open, plan->slots);
    take_geometry(self, header);
    return getrandom(&header->life, sizeof header->life, 0) == (ssize_t)sizeof header->life;
}

static void begin_empty(struct pool *self) {
    memset(self, 0, sizeof *self);
    self->rank = self->reader = -1;
}

enum shared_status pool_create(struct pool *self, int fd, const struct pool_geometry *plan) {
    begin_empty(self);
    enum shared_status status =
        shared_create(&self->file, &kind, fd, plan->file_bytes,
                      plan->slots_offset + plan->slots * plan->slot_stride);
    if (status == SHARED_OK) {
        set_pointers(self);
        status = write_header(self, plan) ? map_slots(self) : SHARED_SYSTEM_ERROR;
    }
    if (status == SHARED_OK) {
        shared_publish(&kind, self->header);
    }
    return status;
}

static enum shared_status check_geometry(struct pool *self, const struct pool_header *copy) {
    struct pool_geometry plan = {.slots = 1,
                                 .max_slots = copy->max_slots,
                                 .slot_bytes = copy->slot_bytes,
                                 .meta_bytes = copy->meta_bytes,
                                 .block_bytes = copy->block_bytes,
                                 .patch_bytes = copy->patch_bytes};
    if (!pool_plan(&plan) || plan.slots_offset != copy->slots_offset ||
        plan.slot_stride != copy->slot_stride || plan.file_bytes != copy->file_bytes) {
        return SHARED_BAD_GEOMETRY;
    }
    take_geometry(self, copy);
    return self->file.found_bytes < copy->file_bytes ? SHARED_TRUNCATED : SHARED_OK;
}

enum shared_status pool_open(struct pool *self, int fd, bool read_only) {
    struct pool_header copy;
    begin_empty(self);
    enum shared_status status = shared_open(&self->file, &kind, fd, read_only, &copy);
    if (status == SHARED_OK) {
        set_pointers(self);
        status = check_geometry(self, &copy);
    }
    return status == SHARED_OK && !read_only ? map_slots(self) : status;
}

void pool_unmap(struct pool *self) {
    shared_unmap(&self->file, &kind);
    if (self->slots != NULL) {
        munmap(self->slots, self->file_bytes - self->slots_offset);
        self->slots = NULL;
    }
}

enum shared_status pool_allow_writing(struct pool *self) {
    uint32_t open = ACQUIRE(self->header->slots_open);
    if (self->writable) {
        return SHARED_OK;
    }
    if (mprotect(self->slots, self->file_bytes - self->slots_offset, PROT_READ | PROT_WRITE) != 0) {
        return SHARED_SYSTEM_ERROR;
    }
    self->writable = true;
    /* Fill page tables now, not during the first publication; older kernels fill them on demand. */
    open = open < self->max_slots ? open : self->max_slots;
    (void)madvise(self->slots, open * self->slot_stride, MADV_POPULATE_WRITE);
    return SHARED_OK;
}

enum shared_status pool_grow(struct pool *self) {
    uint32_t open = ACQUIRE(self->header->slots_open);
    if (open >= self->max_slots) {
        return SHARED_NOTHING;
    }
    uint64_t from = self->slots_offset + open * self->slot_stride;
    enum shared_status status = shared_allocate(self->file.fd, from, self->slot_stride);
    if (status == SHARED_OK) {
        SET_RELEASE(self->header->slots_open, open + 1);
    }
    return status;
}

void pool_isolate(struct pool *self) {
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (self->file.control != NULL) {
        (void)mmap(self->file.control, POOL_TABLES_BYTES, PROT_READ | PROT_WRITE, how, -1, 0);
    }
    if (self->slots != NULL) {
        (void)mmap(self->slots, self->file_bytes - self->slots_offset, PROT_NONE, how, -1, 0);
    }
}

/* ---- Digests of a slot's payload. */
static uint32_t digest_of(const void *data, uint64_t bytes, uint64_t block_bytes, uint32_t block) {
    uint64_t at = block * block_bytes;
    uint64_t left = bytes - at;
    return shmbus_crc32c(0, (const uint8_t *)data + at, left < block_bytes ? left : block_bytes);
}

uint32_t digest_blocks(const void *data, uint64_t bytes, uint64_t block_bytes, uint32_t *digests) {
    uint32_t blocks = (uint32_t)(bytes / block_bytes + (bytes % block_bytes != 0));
    for (uint32_t i = 0; i < blocks; i++) {
        digests[i] = digest_of(data, bytes, block_bytes, i);
    }
    return blocks;
}

uint32_t digest_first_wrong(const void *data, uint64_t bytes, uint64_t block_bytes,
                            const uint32_t *digests, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) {
        if (digest_of(data, bytes, block_bytes, i) != digests[i]) {
            return i;
        }
    }
    return to;
}
