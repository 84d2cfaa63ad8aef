/* Allocating, opening and mapping a pool: all its system calls but futexes and file locks. */
#define _GNU_SOURCE
#include "pool/pool.h"

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

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

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

static uint32_t geometry_crc(const struct pool_header *header) {
    return shmbus_crc32c(0, (const uint8_t *)header + POOL_GEOMETRY_FROM,
                         POOL_GEOMETRY_TO - POOL_GEOMETRY_FROM);
}

static void set_pointers(struct pool *self) {
    uint8_t *at = self->control;
    self->header = (struct pool_header *)at;
    at += POOL_HEADER_BYTES;
    self->slot_rows = (struct slot_row *)at;
    at += POOL_MAX_SLOTS * sizeof(struct slot_row);
    self->rank_rows = (struct rank_row *)at;
    at += POOL_MAX_RANKS * sizeof(struct rank_row);
    self->reader_rows = (struct reader_row *)at;
}

static void begin_empty(struct pool *self, int fd) {
    memset(self, 0, sizeof *self);
    self->fd = fd;
    self->rank = self->reader = -1;
}

/* Maps [from, to) of the file through a description of its own; NULL with errno. */
static uint8_t *map_part(int fd, uint64_t from, uint64_t to, int how, bool read_only) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int own = open(path, (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
    if (own < 0) {
        return NULL;
    }
    void *at = mmap(NULL, to - from, how, MAP_SHARED, own, (off_t)from);
    int why = errno;
    close(own);
    errno = why;
    return at == MAP_FAILED ? NULL : at;
}

static enum pool_status map_control(struct pool *self) {
    int how = self->read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    self->control = map_part(self->fd, 0, POOL_TABLES_BYTES, how, self->read_only);
    if (self->control == NULL) {
        return POOL_SYSTEM_ERROR;
    }
    set_pointers(self);
    return POOL_OK;
}

static enum pool_status map_slots(struct pool *self) {
    self->slots = map_part(self->fd, self->slots_offset, self->file_bytes, PROT_READ, false);
    return self->slots == NULL ? POOL_SYSTEM_ERROR : POOL_OK;
}

/* Memory for a range of the file, zeroed, so that no store into it can fail later. */
static enum pool_status allocate(int fd, uint64_t from, uint64_t bytes) {
    int why;
    do {
        why = posix_fallocate(fd, (off_t)from, (off_t)bytes);
    } while (why == EINTR);
    errno = why;
    return why == 0 ? POOL_OK : why == ENOSPC ? POOL_NO_SPACE : POOL_SYSTEM_ERROR;
}

/* A companion in use: whoever removes an abandoned one finds this lock. */
static enum pool_status share_file(int fd) {
    if (flock(fd, LOCK_SH | LOCK_NB) == 0) {
        return POOL_OK;
    }
    return errno == EWOULDBLOCK ? POOL_UNFINISHED : POOL_SYSTEM_ERROR;
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

static void write_header(struct pool *self, const struct pool_geometry *plan) {
    struct pool_header *header = self->header;
    header->layout_version = POOL_LAYOUT_VERSION;
    header->max_slots = plan->max_slots;
    header->file_bytes = plan->file_bytes;
    header->slots_offset = plan->slots_offset;
    header->slot_stride = plan->slot_stride;
    header->slot_bytes = plan->slot_bytes;
    header->meta_bytes = plan->meta_bytes;
    header->block_bytes = plan->block_bytes;
    header->patch_bytes = plan->patch_bytes;
    header->created_unix_ns = clock_realtime_ns();
    header->geometry_crc = geometry_crc(header);
    atomic_store_explicit(&header->next_sequence, 1, memory_order_relaxed);
    atomic_store_explicit(&header->slots_open, plan->slots, memory_order_relaxed);
    take_geometry(self, header);
}

enum pool_status pool_create(struct pool *self, int fd, const struct pool_geometry *plan) {
    begin_empty(self, fd);
    /* First of all, so that no cleanup takes an unfinished pool for an abandoned one. */
    enum pool_status status = share_file(fd);
    if (status == POOL_OK && ftruncate(fd, (off_t)plan->file_bytes) != 0) {
        status = POOL_SYSTEM_ERROR;
    }
    if (status == POOL_OK) {
        status = allocate(fd, 0, plan->slots_offset + plan->slots * plan->slot_stride);
    }
    if (status == POOL_OK) {
        status = map_control(self);
    }
    if (status == POOL_OK) {
        write_header(self, plan);
        status = map_slots(self);
    }
    if (status != POOL_OK) {
        int why = errno;
        pool_unmap(self);
        errno = why;
        return status;
    }
    /* SYNC: pool-created. The magic says that all of the header is there. */
    atomic_store_explicit(&self->header->magic, POOL_MAGIC, memory_order_release);
    return POOL_OK;
}

static enum pool_status check_header(struct pool *self, uint64_t found_bytes) {
    const struct pool_header *header = self->header;
    /* SYNC: pool-created. */
    uint64_t magic = atomic_load_explicit(&header->magic, memory_order_acquire);
    if (magic != POOL_MAGIC) {
        return magic == 0 ? POOL_UNFINISHED : POOL_BAD_MAGIC;
    }
    self->found_version = header->layout_version;
    if (self->found_version != POOL_LAYOUT_VERSION) {
        return POOL_BAD_VERSION;
    }
    /* The copy is checked, not the shared original, which may change between two looks. */
    struct pool_header copy;
    memcpy(&copy, header, sizeof copy);
    struct pool_geometry plan = {.slots = 1,
                                 .max_slots = copy.max_slots,
                                 .slot_bytes = copy.slot_bytes,
                                 .meta_bytes = copy.meta_bytes,
                                 .block_bytes = copy.block_bytes,
                                 .patch_bytes = copy.patch_bytes};
    if (copy.geometry_crc != geometry_crc(&copy) || !pool_plan(&plan) ||
        plan.slots_offset != copy.slots_offset || plan.slot_stride != copy.slot_stride ||
        plan.file_bytes != copy.file_bytes) {
        return POOL_BAD_GEOMETRY;
    }
    if (found_bytes < copy.file_bytes) {
        self->found_bytes = found_bytes;
        return POOL_TRUNCATED;
    }
    take_geometry(self, &copy);
    return POOL_OK;
}

enum pool_status pool_open(struct pool *self, int fd, bool read_only) {
    struct stat found;
    begin_empty(self, fd);
    self->read_only = read_only;
    if (fstat(fd, &found) != 0) {
        return POOL_SYSTEM_ERROR;
    }
    /* Who only looks keeps nothing alive. */
    enum pool_status status = read_only ? POOL_OK : share_file(fd);
    if (status != POOL_OK) {
        return status;
    }
    if ((uint64_t)found.st_size < POOL_TABLES_BYTES) {
        self->found_bytes = (uint64_t)found.st_size;
        return found.st_size == 0 ? POOL_UNFINISHED : POOL_TRUNCATED;
    }
    status = map_control(self);
    if (status == POOL_OK) {
        status = check_header(self, (uint64_t)found.st_size);
    }
    if (status == POOL_OK && !read_only) {
        status = map_slots(self);
    }
    if (status != POOL_OK) {
        int why = errno;
        pool_unmap(self);
        errno = why;
    }
    return status;
}

void pool_unmap(struct pool *self) {
    if (self->control != NULL) {
        munmap(self->control, POOL_TABLES_BYTES);
    }
    if (self->slots != NULL) {
        munmap(self->slots, self->file_bytes - self->slots_offset);
    }
    self->control = self->slots = NULL;
}

enum pool_status pool_allow_writing(struct pool *self) {
    uint32_t open = atomic_load_explicit(&self->header->slots_open, memory_order_acquire);
    if (self->writable) {
        return POOL_OK;
    }
    if (mprotect(self->slots, self->file_bytes - self->slots_offset, PROT_READ | PROT_WRITE) != 0) {
        return POOL_SYSTEM_ERROR;
    }
    self->writable = true;
    /* Page tables now rather than in the first publication; older kernels fill them as it goes. */
    open = open < self->max_slots ? open : self->max_slots;
    (void)madvise(self->slots, open * self->slot_stride, MADV_POPULATE_WRITE);
    return POOL_OK;
}

enum pool_status pool_grow(struct pool *self) {
    uint32_t open = atomic_load_explicit(&self->header->slots_open, memory_order_acquire);
    if (open >= self->max_slots) {
        return POOL_NOTHING;
    }
    uint64_t from = self->slots_offset + open * self->slot_stride;
    enum pool_status status = allocate(self->fd, from, self->slot_stride);
    if (status == POOL_OK) {
        atomic_store_explicit(&self->header->slots_open, open + 1, memory_order_release);
    }
    return status;
}

void pool_isolate(struct pool *self) {
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (self->control != NULL) {
        (void)mmap(self->control, POOL_TABLES_BYTES, PROT_READ | PROT_WRITE, how, -1, 0);
    }
    if (self->slots != NULL) {
        (void)mmap(self->slots, self->file_bytes - self->slots_offset, PROT_NONE, how, -1, 0);
    }
    if (self->fd >= 0) {
        close(self->fd);
        self->fd = -1;
    }
}
