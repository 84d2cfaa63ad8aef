/* System calls to make, map and check a segment (see shared_file.h). */
#define _GNU_SOURCE
#include "base/shared_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checksum.h"

#define CRC_FROM sizeof(uint64_t) /* behind the magic */

static uint32_t crc_of(const struct shared_kind *kind, const void *header) {
    return shmbus_crc32c(0, (const uint8_t *)header + CRC_FROM, kind->crc_at - CRC_FROM);
}

void shared_publish(const struct shared_kind *kind, void *header) {
    struct shared_header *shared = header;
    shared->layout_version = kind->layout_version;
    uint32_t crc = crc_of(kind, header);
    memcpy((uint8_t *)header + kind->crc_at, &crc, sizeof crc);
    /* SYNC: segment-ready. The magic follows every store above. */
    SET_RELEASE(shared->magic, kind->magic);
}

enum shared_status shared_look(const struct shared_kind *kind, const void *header, void *copy,
                               uint32_t *found_version) {
    const struct shared_header *shared = header;
    /* SYNC: segment-ready. */
    uint64_t magic = ACQUIRE(shared->magic);
    if (magic != kind->magic) {
        return magic == 0 ? SHARED_UNFINISHED : SHARED_BAD_MAGIC;
    }
    /* Check the copy; the shared original may change between two looks. */
    memcpy(copy, header, kind->header_bytes);
    *found_version = ((const struct shared_header *)copy)->layout_version;
    return *found_version == kind->layout_version ? SHARED_OK : SHARED_BAD_VERSION;
}

bool shared_crc_holds(const struct shared_kind *kind, const void *copy) {
    uint32_t crc = crc_of(kind, copy);
    return memcmp((const uint8_t *)copy + kind->crc_at, &crc, sizeof crc) == 0;
}

enum shared_status shared_size(int fd, uint64_t least, uint64_t *found_bytes) {
    struct stat found;
    if (fstat(fd, &found) != 0) {
        return SHARED_SYSTEM_ERROR;
    }
    *found_bytes = (uint64_t)found.st_size;
    return *found_bytes == 0 ? SHARED_UNFINISHED : *found_bytes < least ? SHARED_TRUNCATED : SHARED_OK;
}

enum shared_status shared_allocate(int fd, uint64_t from, uint64_t bytes) {
    int why;
    do {
        why = posix_fallocate(fd, (off_t)from, (off_t)bytes);
    } while (why == EINTR);
    errno = why;
    return why == 0                         ? SHARED_OK
           : why == ENOSPC || why == EFBIG ? SHARED_NO_SPACE
           : why == ENOMEM                  ? SHARED_NO_MEMORY
                                            : SHARED_SYSTEM_ERROR;
}

int shared_reopen(int fd, bool read_only) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
}

uint8_t *shared_map(int fd, uint64_t from, uint64_t bytes, int protection, bool read_only) {
    int own = shared_reopen(fd, read_only);
    if (own < 0) {
        return NULL;
    }
    void *at = mmap(NULL, bytes, protection, MAP_SHARED, own, (off_t)from);
    int why = errno;
    close(own);
    errno = why;
    return at == MAP_FAILED ? NULL : at;
}

/* Marks a file in use: a remover of abandoned files finds this lock. */
static enum shared_status use(int fd) {
    if (flock(fd, LOCK_SH | LOCK_NB) == 0) {
        return SHARED_OK;
    }
    return errno == EWOULDBLOCK ? SHARED_UNFINISHED : SHARED_SYSTEM_ERROR;
}

static enum shared_status map_control(struct shared_file *self, const struct shared_kind *kind) {
    int protection = self->read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    self->control = shared_map(self->fd, 0, kind->tables_bytes, protection, self->read_only);
    return self->control == NULL ? SHARED_SYSTEM_ERROR : SHARED_OK;
}

enum shared_status shared_create(struct shared_file *self, const struct shared_kind *kind, int fd,
                                 uint64_t file_bytes, uint64_t allocated) {
    *self = (struct shared_file){.fd = fd};
    /* First step: no cleanup then takes an unfinished file for an abandoned file. */
    enum shared_status status = use(fd);
    if (status == SHARED_OK && ftruncate(fd, (off_t)file_bytes) != 0) {
        status = SHARED_SYSTEM_ERROR;
    }
    if (status == SHARED_OK) {
        status = shared_allocate(fd, 0, allocated);
    }
    return status == SHARED_OK ? map_control(self, kind) : status;
}

enum shared_status shared_open(struct shared_file *self, const struct shared_kind *kind, int fd,
                               bool read_only, void *copy) {
    *self = (struct shared_file){.fd = fd, .read_only = read_only};
    /* A read-only process keeps no file alive. */
    enum shared_status status = read_only ? SHARED_OK : use(fd);
    if (status == SHARED_OK) {
        status = shared_size(fd, kind->tables_bytes, &self->found_bytes);
    }
    if (status == SHARED_OK) {
        status = map_control(self, kind);
    }
    if (status == SHARED_OK) {
        status = shared_look(kind, self->control, copy, &self->found_version);
    }
    return status != SHARED_OK || shared_crc_holds(kind, copy) ? status : SHARED_BAD_GEOMETRY;
}

void shared_unmap(struct shared_file *self, const struct shared_kind *kind) {
    if (self->control != NULL) {
        munmap(self->control, kind->tables_bytes);
        self->control = NULL;
    }
}
