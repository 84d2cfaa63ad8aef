/* Checksums by every way agree, and a whole record is read back at its own place only. */
#define _GNU_SOURCE
#include "base/checksum.h"
#include "support.h"

/* Bit by bit, slow. */
static uint32_t crc32c_by_bits(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *p = data;
    crc = ~crc;
    while (bytes--) {
        crc ^= *p++;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ (0x82F63B78u & (0u - (crc & 1u)));
        }
    }
    return ~crc;
}

static void checksums_agree(uint64_t *random) {
    uint8_t data[3000];
    for (int round = 0; round < 600; round++) {
        for (size_t i = 0; i < sizeof data; i++) {
            data[i] = (uint8_t)next_random(random);
        }
        size_t from = next_random(random) % 16;
        size_t bytes = next_random(random) % (sizeof data - from);
        CHECK(shmbus_crc32c(7, data + from, bytes) == crc32c_by_bits(7, data + from, bytes));
    }
    /* The check value of CRC-32C. */
    CHECK(shmbus_crc32c(0, "123456789", 9) == 0xE3069283u);
}

static struct record_header *whole_record(const struct record_place *place, uint64_t n) {
    struct sample sample;
    make_sample(&sample, "prompt", n);
    struct record_header *record =
        aligned_alloc(SHMBUS_RECORD_ALIGN, (size_t)sample.spec.record_bytes);
    CHECK(record != NULL);
    memset((void *)record, 0xAA, (size_t)sample.spec.record_bytes);
    record_write_frame(record, place, sample.spec.record_bytes, 9, 2, SHMBUS_FLAG_PAYLOAD_CRC);
    record_write_body(record, &sample.spec);
    record_close(record, sample.spec.record_bytes, 4, 5);
    atomic_store(&record->state, SHMBUS_COMMITTED);
    return record;
}

static enum record_verdict read_record(const struct record_header *record, uint64_t room,
                                       const struct record_place *place,
                                       struct record_copy *copy) {
    enum record_verdict verdict = record_read_frame(record, room, place, &copy->header);
    return verdict == RECORD_OK ? record_read_body(record, copy) : verdict;
}

static void a_whole_record_is_read_back(struct record_copy *copy) {
    struct record_place place = {3, 8, 640};
    struct record_header *record = whole_record(&place, 100);
    uint64_t bytes = record->record_bytes;
    CHECK(read_record(record, bytes, &place, copy) == RECORD_OK);
    CHECK(copy->header.sequence == 4 && copy->header.lane_number == 5);
    CHECK(copy->shape[1] == 100 && memcmp(copy->id, "prompt", 6) == 0);
    struct record_place elsewhere = {3, 9, 640};
    CHECK(read_record(record, bytes, &elsewhere, copy) == RECORD_BAD_FRAME);
    CHECK(read_record(record, bytes - 64, &place, copy) == RECORD_BAD_FRAME);
    free(record);
}

int main(void) {
    uint64_t random = test_seed();
    struct record_copy *copy = malloc(sizeof *copy);
    CHECK(copy != NULL);
    checksums_agree(&random);
    a_whole_record_is_read_back(copy);
    free(copy);
    puts("record_test: passed");
    return 0;
}
