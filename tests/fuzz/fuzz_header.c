/* A file with any bytes as its first page: segment_open refuses it, or its numbers hold.
 *
 * Input: the header's bytes. An even first byte of the input's last eight asks for a correct
 * checksum, to reach the bounds. */
#define _GNU_SOURCE
#include "base/checksum.h"
#include "fuzz.h"

#define FILE_BYTES (64u << 10)

static int file = -1;

static void check_bounds(const struct segment *segment) {
    CHECK(segment->bytes <= FILE_BYTES);
    CHECK((uint8_t *)segment->slots + ((uint64_t)segment->max_producers + 1) *
                                          sizeof(struct producer_slot) <=
          segment->base + segment->data_offset);
    CHECK((uint8_t *)(segment->intent_log + SHMBUS_MAX_GROUP_SIZE) <=
          segment->base + segment->data_offset);
    CHECK(segment_extent(segment, segment->extent_count - 1) + segment->extent_bytes ==
          segment->base + segment->bytes);
    CHECK(segment->record_limit <= segment->bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    alignas(struct bus_header) uint8_t page[SHMBUS_PAGE] = {0};
    struct segment segment;
    if (file < 0) {
        file = memory_file();
        CHECK(ftruncate(file, FILE_BYTES) == 0);
    }
    memcpy(page, data, size < sizeof page ? size : sizeof page);
    struct bus_header *header = (struct bus_header *)(void *)page;
    if (size > 0 && data[size - 1] % 2 == 0) {
        atomic_store(&header->magic, SHMBUS_MAGIC);
        header->layout_version = SHMBUS_LAYOUT_VERSION;
        header->layout_hash = SHMBUS_LAYOUT_HASH;
        header->geometry_crc = shmbus_crc32c(0, page + 8, 48);
    }
    CHECK(pwrite(file, page, sizeof page, 0) == (ssize_t)sizeof page);
    int fd = reopen(file);
    if (segment_open(&segment, fd, false) == SHARED_OK) {
        check_bounds(&segment);
    }
    close(segment.fd);
    segment_unmap(&segment);
    return 0;
}
