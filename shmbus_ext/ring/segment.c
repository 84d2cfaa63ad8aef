/* Allocating, opening and mapping the segment: every system call except futexes and file locks. */
#define _GNU_SOURCE
#include "ring/segment.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file_lock.h"
#include "base/threads.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* A producer leases space extent by extent: large enough for rare leases, small enough to limit the
 * extents of idle producers, one each, to a quarter of the bus. */
#define EXTENTS_WANTED 256u
#define EXTENTS_A_PRODUCER 4u
#define SMALLEST_EXTENT SHMBUS_PAGE
#define LARGEST_EXTENT (UINT64_C(1) << 20)
/* Share of the bus for one record, to let producers of large records overlap. */
#define RECORD_SHARE 4u
/* Larger segments map pages on first touch in an attaching process; smaller segments in one
 * call. */
#define POPULATE_ON_OPEN_BYTES (UINT64_C(1) << 30)
#define TOUCH_THREADS 4u
#define TOUCH_CHUNK (UINT64_C(32) << 20)
/* A chunk in huge pages takes some 15 ms; in fragmented memory, seconds. */
#define COLLAPSE_PATIENCE_NS UINT64_C(500000000)
/* Mappings begin at a multiple of this size, to allow whole huge pages of the file. */
#define HUGE_PAGE (UINT64_C(2) << 20)

static const struct shared_kind kind = {
    .magic = SHMBUS_MAGIC,
    .layout_version = SHMBUS_LAYOUT_VERSION,
    .header_bytes = sizeof(struct bus_header),
    .crc_at = offsetof(struct bus_header, geometry_crc),
    .tables_bytes = SHMBUS_PAGE,
};

static uint64_t power_of_two_below(uint64_t value) {
    uint64_t power = 1;
    while (power <= value / 2) {
        power *= 2;
    }
    return power;
}

static uint64_t tables_bytes(uint32_t max_producers, uint32_t extent_count,
                             uint64_t extent_bytes) {
    return SHMBUS_HEADER_BYTES + ((uint64_t)max_producers + 1) * sizeof(struct producer_slot) +
           (uint64_t)extent_count * sizeof(struct extent_desc) +
           (uint64_t)SHMBUS_MAX_GROUP_SIZE * sizeof(uint64_t) +
           (uint64_t)SHMBUS_RETRY_ENTRIES * sizeof(struct retry_entry) +
           SHMBUS_SPLITS_BYTES + (uint64_t)SHMBUS_CANCELLED * sizeof(uint64_t) +
           sizeof(struct declared_part) + sizeof(struct delivery_figures) +
           ((uint64_t)max_producers + 1) * sizeof(struct wait_row) +
           sizeof(struct lead_table) + (uint64_t)SHMBUS_LEAD_ROWS * sizeof(uint64_t) +
           sizeof(struct relay_journal) +
           relay_entries_of(extent_count * extent_bytes) * sizeof(struct relay_entry);
}

bool segment_plan(uint64_t capacity, uint32_t max_producers, uint64_t extent_bytes,
                  struct segment_geometry *plan) {
    if (max_producers < 1 || max_producers > SHMBUS_MAX_PRODUCERS || capacity < SMALLEST_EXTENT ||
        capacity > (UINT64_C(1) << 46)) {
        return false;
    }
    if (extent_bytes == 0) {
        uint64_t wanted = (uint64_t)max_producers * EXTENTS_A_PRODUCER;
        extent_bytes = capacity / (wanted > EXTENTS_WANTED ? wanted : EXTENTS_WANTED);
        extent_bytes = power_of_two_below(extent_bytes > 0 ? extent_bytes : 1);
        if (extent_bytes < SMALLEST_EXTENT) {
            extent_bytes = SMALLEST_EXTENT;
        }
        if (extent_bytes > LARGEST_EXTENT) {
            extent_bytes = LARGEST_EXTENT;
        }
        while (capacity / extent_bytes >= SHMBUS_MAX_EXTENTS) {
            extent_bytes *= 2;
        }
    }
    if (extent_bytes % SHMBUS_PAGE != 0 || extent_bytes > capacity) {
        return false;
    }
    uint64_t count = shmbus_align_up(capacity, extent_bytes) / extent_bytes;
    if (count < 1 || count > SHMBUS_MAX_EXTENTS) {
        return false;
    }
    plan->extent_bytes = extent_bytes;
    plan->extent_count = (uint32_t)count;
    plan->max_producers = max_producers;
    plan->max_lead = plan->max_lead_versions = plan->declared_bytes = 0;
    uint64_t requests = capacity / SHMBUS_REQUEST_SHARE;
    requests = requests < SHMBUS_REQUEST_MIN_BYTES   ? SHMBUS_REQUEST_MIN_BYTES
               : requests > SHMBUS_REQUEST_MAX_BYTES ? SHMBUS_REQUEST_MAX_BYTES
                                                     : requests;
    return segment_plan_requests(plan, requests);
}

bool segment_plan_requests(struct segment_geometry *plan, uint64_t request_bytes) {
    struct request_parts parts;
    if (request_bytes > SHMBUS_REQUEST_MAX_BYTES ||
        !request_divide(&parts, NULL, request_bytes)) {
        return false;
    }
    plan->data_offset = shmbus_align_up(
        shmbus_align_up(tables_bytes(plan->max_producers, plan->extent_count, plan->extent_bytes), 128) + request_bytes,
        SHMBUS_PAGE);
    plan->segment_bytes = plan->data_offset + plan->extent_count * plan->extent_bytes;
    return true;
}

struct touch_job {
    uint8_t *base;
    uint64_t bytes;
    _Atomic bool small_pages;
};

/* Requests huge pages (from kernel 6.1 on, whatever the mount says), because every process maps the
 * whole bus and walks it again and again. After a refusal, or a delay to free up memory, the rest
 * of the segment stays in small pages. */
static void collapse(struct touch_job *job, uint64_t at, uint64_t bytes) {
    if (RELAXED(job->small_pages)) {
        return;
    }
    uint64_t start = clock_monotonic_ns();
    if (madvise(job->base + at, bytes, MADV_COLLAPSE) != 0 ||
        clock_monotonic_ns() - start > COLLAPSE_PATIENCE_NS) {
        SET_RELAXED(job->small_pages, true);
    }
}

static void touch_chunk(void *argument, uint32_t chunk) {
    struct touch_job *job = argument;
    uint64_t at = chunk * TOUCH_CHUNK;
    uint64_t bytes = job->bytes - at < TOUCH_CHUNK ? job->bytes - at : TOUCH_CHUNK;
    collapse(job, at, bytes);
    if (madvise(job->base + at, bytes, MADV_POPULATE_WRITE) != 0) {
        /* Kernels before 5.14: write a zero to every unwritten page. */
        for (uint64_t page = at; page < at + bytes; page += SHMBUS_PAGE) {
            *(volatile uint8_t *)(job->base + page) = 0;
        }
    }
}

/* First touch of shared memory is slow on a single core: use several threads. */
static void touch_all(uint8_t *base, uint64_t bytes) {
    struct touch_job job = {base, bytes, false};
    uint32_t chunks = (uint32_t)((bytes + TOUCH_CHUNK - 1) / TOUCH_CHUNK);
    threads_run(TOUCH_THREADS, chunks, touch_chunk, &job);
}

static void set_pointers(struct segment *self) {
    uint8_t *at = self->base;
    self->header = (struct bus_header *)at;
    at += SHMBUS_HEADER_BYTES;
    self->slots = (struct producer_slot *)at;
    at += ((uint64_t)self->max_producers + 1) * sizeof(struct producer_slot);
    self->extents = (struct extent_desc *)at;
    at += (uint64_t)self->extent_count * sizeof(struct extent_desc);
    self->intent_log = (_Atomic uint64_t *)at;
    at += (uint64_t)SHMBUS_MAX_GROUP_SIZE * sizeof(uint64_t);
    self->retries = (struct retry_entry *)at;
    self->splits = (struct split_entry *)(self->retries + SHMBUS_RETRY_ENTRIES);
    self->cancelled = (_Atomic uint64_t *)(self->splits + SHMBUS_MAX_SPLITS);
    self->declared = (struct declared_part *)(self->cancelled + SHMBUS_CANCELLED);
    self->figures = (struct delivery_figures *)(self->declared + 1);
    self->waits = (struct wait_row *)(self->figures + 1);
    self->lead = (struct lead_table *)(self->waits + self->max_producers + 1);
    self->relay = (struct relay_journal *)(void *)(self->lead->rows + SHMBUS_LEAD_ROWS);
    self->relay_entries = (struct relay_entry *)(self->relay + 1);
    self->relay_entry_count = relay_entries_of(self->extent_count * self->extent_bytes);
    uint64_t requests_at =
        shmbus_align_up(tables_bytes(self->max_producers, self->extent_count, self->extent_bytes), 128);
    (void)request_divide(&self->requests, self->base + requests_at,
                          self->data_offset - requests_at);
    self->data = self->base + self->data_offset;
    self->max_span =
        self->extent_count < RECORD_SHARE ? 1 : self->extent_count / RECORD_SHARE;
    self->record_limit = (uint64_t)self->max_span * self->extent_bytes;
}

static int protection(const struct segment *self) {
    return self->read_only ? PROT_READ : PROT_READ | PROT_WRITE;
}

/* Reserves address space from a multiple of a huge page on. NULL without space, and below one huge
 * page. */
static void *aligned_room(uint64_t bytes) {
    if (bytes < HUGE_PAGE) {
        return NULL;
    }
    uint64_t kept = shmbus_align_up(bytes, SHMBUS_PAGE), room = kept + HUGE_PAGE;
    uint8_t *start =
        mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        return NULL;
    }
    uint8_t *aligned = start + (HUGE_PAGE - (uintptr_t)start % HUGE_PAGE) % HUGE_PAGE;
    if (aligned > start) {
        munmap(start, (size_t)(aligned - start));
    }
    if (aligned + kept < start + room) {
        munmap(aligned + kept, (size_t)(start + room - (aligned + kept)));
    }
    return aligned;
}

/* MAP_FAILED with errno. */
static void *map_shared(uint64_t bytes, int how, int fd) {
    void *room = aligned_room(bytes);
    void *base = mmap(room, bytes, how, MAP_SHARED | (room == NULL ? 0 : MAP_FIXED), fd, 0);
    if (base == MAP_FAILED && room != NULL) {
        int why = errno;
        munmap(room, shmbus_align_up(bytes, SHMBUS_PAGE));
        errno = why;
    }
    return base;
}

static enum shared_status map_file(struct segment *self) {
    void *base = map_shared(self->bytes, protection(self), self->fd);
    if (base == MAP_FAILED) {
        self->base = NULL;
        return errno == ENOMEM ? SHARED_NO_MEMORY : SHARED_SYSTEM_ERROR;
    }
    self->base = base;
    return SHARED_OK;
}

/* Moves the locks from the mapped description to a private description of this process. */
static enum shared_status take_description(struct segment *self) {
    int own = shared_reopen(self->fd, self->read_only);
    if (own < 0) {
        return SHARED_SYSTEM_ERROR;
    }
    enum lock_status lock = file_lock_share(own, SHMBUS_LOCK_USERS);
    if (lock != LOCK_TAKEN) {
        close(own);
        /* A remover holds the lock for a moment; the caller looks again. */
        return lock == LOCK_HELD_ELSEWHERE ? SHARED_UNFINISHED : SHARED_SYSTEM_ERROR;
    }
    file_lock_drop(self->fd, SHMBUS_LOCK_USERS);
    close(self->fd);
    self->fd = own;
    return SHARED_OK;
}

enum shared_status segment_create(struct segment *self, int fd,
                                   const struct segment_geometry *plan) {
    memset(self, 0, sizeof *self);
    self->fd = fd;
    self->bytes = plan->segment_bytes;
    self->data_offset = plan->data_offset;
    self->extent_bytes = plan->extent_bytes;
    self->extent_count = plan->extent_count;
    self->max_producers = plan->max_producers;
    /* First step: no cleanup then takes an unfinished segment for a forgotten one. */
    if (file_lock_share(fd, SHMBUS_LOCK_USERS) != LOCK_TAKEN) {
        errno = EBUSY;
        return SHARED_SYSTEM_ERROR;
    }
    enum shared_status status = shared_allocate(fd, 0, plan->segment_bytes);
    if (status == SHARED_OK) {
        status = map_file(self);
    }
    if (status != SHARED_OK) {
        return status;
    }
    touch_all(self->base, self->bytes);
    set_pointers(self);
    for (uint32_t i = 0; i < self->extent_count; i++) {
        SET_RELAXED(self->extents[i].word, UINT64_C(1) << 32);
    }
    for (uint32_t i = self->extent_count - segment_reserved(self); i < self->extent_count; i++) {
        SET_RELAXED(self->extents[i].word, UINT64_C(1) << 32 | (plan->max_producers + 1));
    }
    declared_schema_write(self->declared, plan->declared, plan->declared_bytes);
    struct bus_header *header = self->header;
    header->layout_hash = SHMBUS_LAYOUT_HASH;
    header->segment_bytes = plan->segment_bytes;
    header->data_offset = plan->data_offset;
    header->extent_bytes = plan->extent_bytes;
    header->extent_count = plan->extent_count;
    header->max_producers = plan->max_producers;
    header->created_unix_ns = self->created_unix_ns = clock_realtime_ns();
    const size_t bytes = sizeof header->identity;
    if (getrandom(header->identity, bytes, 0) != (ssize_t)bytes) {
        return SHARED_SYSTEM_ERROR;
    }
    identity_text(self->identity, header->identity);
    self->lead->max_groups = plan->max_lead;
    self->lead->max_versions = plan->max_lead_versions;
    /* With a bound in versions alone, the first group determines the bound in groups. */
    uint32_t limit = plan->max_lead_versions > 0 ? 1 : plan->max_lead;
    SET_RELAXED(self->lead->limit, limit);
    SET_RELAXED(header->next_producer_id, 1);
    rounds_begin(header, header->created_unix_ns);
    splits_begin(self);
    shared_publish(&kind, header);
    return take_description(self);
}

/* Validates the hostile header: do the numbers make a segment of this file's size? */
static bool geometry_holds(const struct bus_header *header, uint64_t file_bytes,
                           struct segment *self) {
    self->bytes = header->segment_bytes;
    self->data_offset = header->data_offset;
    self->extent_bytes = header->extent_bytes;
    self->extent_count = header->extent_count;
    self->max_producers = header->max_producers;
    self->created_unix_ns = header->created_unix_ns;
    if (!shared_crc_holds(&kind, header) || self->extent_count < 1 ||
        self->extent_count > SHMBUS_MAX_EXTENTS || self->max_producers < 1 ||
        self->max_producers > SHMBUS_MAX_PRODUCERS || self->extent_bytes % SHMBUS_PAGE != 0 ||
        self->extent_bytes < SHMBUS_PAGE || self->extent_bytes > (UINT64_C(1) << 46) ||
        self->data_offset % SHMBUS_PAGE != 0 || self->data_offset > file_bytes) {
        return false;
    }
    uint64_t tables =
        shmbus_align_up(tables_bytes(self->max_producers, self->extent_count, self->extent_bytes), 128);
    struct request_parts parts;
    if (self->data_offset < tables ||
        !request_divide(&parts, NULL, self->data_offset - tables)) {
        return false;
    }
    return self->bytes == self->data_offset + self->extent_bytes * self->extent_count;
}

static enum shared_status check_header(struct segment *self, uint64_t file_bytes) {
    struct bus_header header;
    self->found_bytes = file_bytes;
    enum shared_status status = shared_look(&kind, self->base, &header, &self->found_version);
    if (status != SHARED_OK) {
        return status;
    }
    self->found_hash = header.layout_hash;
    if (header.layout_hash != SHMBUS_LAYOUT_HASH) {
        return SHARED_BAD_HASH;
    }
    if (header.segment_bytes > file_bytes) {
        return SHARED_TRUNCATED;
    }
    identity_text(self->identity, header.identity);
    return geometry_holds(&header, file_bytes, self) ? SHARED_OK : SHARED_BAD_GEOMETRY;
}

enum shared_status segment_survey(struct segment *self, uint8_t *header, uint64_t file_bytes) {
    memset(self, 0, sizeof *self);
    self->fd = -1;
    self->base = header;
    enum shared_status status = check_header(self, file_bytes);
    if (status == SHARED_OK) {
        set_pointers(self);
    }
    self->base = NULL;
    return status;
}

enum shared_status segment_open(struct segment *self, int fd, bool read_only) {
    memset(self, 0, sizeof *self);
    self->fd = fd;
    self->read_only = read_only;
    enum shared_status status = shared_size(fd, SHMBUS_PAGE, &self->found_bytes);
    if (status != SHARED_OK) {
        return status;
    }
    self->bytes = SHMBUS_PAGE;
    status = map_file(self);
    if (status != SHARED_OK) {
        return status;
    }
    status = check_header(self, self->found_bytes);
    munmap(self->base, SHMBUS_PAGE);
    self->base = NULL;
    if (status != SHARED_OK) {
        return status;
    }
    status = map_file(self);
    if (status != SHARED_OK) {
        return status;
    }
    set_pointers(self);
    if (self->bytes <= POPULATE_ON_OPEN_BYTES) {
        /* Best effort: pages not mapped now are mapped on first touch. */
        (void)madvise(self->base, self->bytes, MADV_POPULATE_READ);
    }
    return take_description(self);
}

void segment_unmap(struct segment *self) {
    if (self->base != NULL) {
        munmap(self->base, self->bytes);
        self->base = NULL;
    }
    if (self->view_base != NULL) {
        munmap(self->view_base, self->bytes);
        self->view_base = NULL;
    }
}

enum shared_status segment_map_views(struct segment *self) {
    int fd = shared_reopen(self->fd, true);
    if (fd < 0) {
        return SHARED_SYSTEM_ERROR;
    }
    void *views = map_shared(self->bytes, PROT_READ, fd);
    int why = errno;
    close(fd);
    errno = why;
    if (views == MAP_FAILED) {
        return errno == ENOMEM ? SHARED_NO_MEMORY : SHARED_SYSTEM_ERROR;
    }
    self->view_base = views;
    return SHARED_OK;
}

bool segment_copies_begin(struct segment_copies *self, uint64_t first, uint64_t end,
                          uint64_t bytes) {
    self->offset = first / SHMBUS_PAGE * SHMBUS_PAGE;
    self->bytes = shmbus_align_up(end, SHMBUS_PAGE) - self->offset;
    void *at = mmap(NULL, self->bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    self->at = at == MAP_FAILED ? NULL : at;
    if (self->at != NULL && bytes < self->bytes / 2) {
        /* Few scattered pages: huge pages would take many times their size. */
        (void)madvise(self->at, self->bytes, MADV_NOHUGEPAGE);
    }
    return self->at != NULL;
}

void segment_copies_add(struct segment_copies *self, const uint8_t *mapping, uint64_t offset,
                        uint64_t bytes) {
    memcpy(self->at + (offset - self->offset), mapping + offset, bytes);
}

bool segment_copies_replace(struct segment_copies *self, uint8_t *mapping) {
    /* One atomic replacement: a reader of the old pages sees the same bytes before and after. */
    if (mremap(self->at, self->bytes, self->bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
               mapping + self->offset) == MAP_FAILED) {
        return false;
    }
    self->at = NULL;
    return true;
}

void segment_copies_drop(struct segment_copies *self) {
    if (self->at != NULL) {
        munmap(self->at, self->bytes);
        self->at = NULL;
    }
}

void segment_isolate(struct segment *self) {
    /* Through a private description: a mapping of the locked description would keep the lock. */
    int fd = self->base == NULL ? -1 : shared_reopen(self->fd, self->read_only);
    if (fd >= 0) {
        (void)mmap(self->base, self->bytes, protection(self), MAP_PRIVATE | MAP_FIXED, fd, 0);
        close(fd);
    }
    if (self->view_base != NULL) {
        (void)mmap(self->view_base, self->bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
}

/* ---- A removed bus: marking and detection. */
bool removal_note(struct segment *self) {
    struct stat found;
    if (removal_happened(self)) {
        return true;
    }
    /* A file with a remaining name was renamed by a link, and stays in use. */
    if (self->fd < 0 || fstat(self->fd, &found) != 0 || found.st_nlink > 0) {
        return false;
    }
    if (!self->read_only) {
        struct bus_header *header = self->header;
        SET_RELAXED(header->pause_unix_ns, clock_realtime_ns());
        SET_RELEASE(header->paused, SHMBUS_REMOVED);
        bell_ring_all(&header->space_bell);
        bell_ring_all(&self->requests.lane->work);
        doorbell_ring(header);
    }
    return true;
}
