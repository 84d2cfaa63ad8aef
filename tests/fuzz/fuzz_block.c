/* A block of any bytes: refused, or read to its end within its bounds, and each record written.
 *
 * Input: a byte, then the block. A first byte below 192 asks for correct lengths and checksums, and
 * an even such byte also for a correct head of the first record. */
#include "fuzz.h"

#include "ring/block.h"
#include "base/checksum.h"

#define LARGEST (64u << 10)

static struct record_copy copy;

static void make_right(uint8_t *block, size_t size, bool head_too) {
    struct block_header header;
    struct record_header head;
    memcpy(&header, block, sizeof header);
    header.magic = BLOCK_MAGIC;
    header.version = BLOCK_VERSION;
    header.layout_version = SHMBUS_LAYOUT_VERSION;
    header.bytes = size;
    header.count %= 8;
    if (head_too && size >= sizeof header + sizeof head) {
        uint8_t *record = block + sizeof header;
        memcpy(&head, record, sizeof head);
        uint64_t tables = record_tables_bytes(&head);
        if (head.record_bytes <= size - sizeof header && tables <= size - sizeof header - sizeof head) {
            head.header_crc = record_header_crc(&head, record + sizeof head);
            memcpy(record, &head, sizeof head);
        }
    }
    header.records_crc = shmbus_crc32c(0, block + sizeof header, size - sizeof header);
    header.header_crc = shmbus_crc32c(0, &header, offsetof(struct block_header, header_crc));
    memcpy(block, &header, sizeof header);
}

static void write_out(const uint8_t *image, const uint8_t *end) {
    const struct record_place place = {3, 7, 128};
    uint64_t bytes = copy.header.record_bytes;
    CHECK(bytes <= (uint64_t)(end - image));
    struct record_header *to = aligned_alloc(SHMBUS_RECORD_ALIGN, (size_t)bytes);
    CHECK(to != NULL);
    block_write(to, &place, &copy, image, 5, 6, 0);
    record_reseal(to, bytes);
    atomic_store(&to->state, SHMBUS_COMMITTED);
    static struct record_copy again;
    CHECK(record_read_frame(to, bytes, &place, &again.header) == RECORD_OK);
    CHECK(record_read_tables(to, &again) == RECORD_OK);
    CHECK(again.header.producer_id == 5 && again.header.slot == 6);
    uint32_t check;
    CHECK(block_head_check(to, bytes, &check));
    free(to);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1 || size > LARGEST) {
        return 0;
    }
    uint8_t way = *data++;
    size--;
    /* Of exactly its size, and unaligned, like a foreign buffer. */
    uint8_t *room = malloc(size + 1);
    CHECK(room != NULL);
    uint8_t *block = room + 1;
    memcpy(block, data, size);
    if (way < 192 && size >= sizeof(struct block_header)) {
        make_right(block, size, way % 2 == 0);
    }
    struct block_header header;
    struct block_cursor cursor;
    struct block_report report;
    if (block_open(block, size, &header, &cursor, &report)) {
        const uint8_t *image;
        while ((image = block_next(&cursor, &copy, &report)) != NULL) {
            write_out(image, block + size);
        }
        CHECK(report.fault != BLOCK_OK || cursor.at == block + size);
    }
    if (block_reopen(block, size, &cursor)) {
        while (block_skip(&cursor)) {
            CHECK(cursor.at <= block + size);
        }
    }
    free(room);
    return 0;
}
