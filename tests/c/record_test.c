/* Records with changed bytes: never read out of bounds, never accepted as whole.
 *
 * A record lies in a block of exactly its size: AddressSanitizer sees a read of a byte too many. */
#define _GNU_SOURCE
#include "base/checksum.h"
#include "support.h"

static void checksums_agree(uint64_t *random) {
    uint8_t data[3000];
    for (int round = 0; round < 600; round++) {
        for (size_t i = 0; i < sizeof data; i++) {
            data[i] = (uint8_t)next_random(random);
        }
        size_t from = next_random(random) % 16;
        size_t bytes = next_random(random) % (sizeof data - from);
        CHECK(shmbus_crc32c(7, data + from, bytes) ==
              shmbus_crc32c_reference(7, data + from, bytes));
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

static void every_flipped_bit_is_found(struct record_copy *copy) {
    struct record_place place = {0, 1, 0};
    struct record_header *record = whole_record(&place, 64);
    uint64_t bytes = record->record_bytes;
    uint8_t *raw = (uint8_t *)record;
    for (uint64_t bit = 32; bit < bytes * 8; bit++) {
        raw[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        enum record_verdict verdict = read_record(record, bytes, &place, copy);
        /* The header's checksum does not cover the checksum of the payload's padding, but that of
         * the payload does: no bit of the record goes unnoticed. */
        CHECK(verdict != RECORD_OK);
        raw[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
    CHECK(read_record(record, bytes, &place, copy) == RECORD_OK);
    free(record);
}

/* Checksums are no defence against a writer that computes them too: bounds must hold alone. */
static void forged_records_with_right_checksums_stay_in_bounds(uint64_t *random,
                                                               struct record_copy *copy) {
    struct record_place place = {0, 1, 0};
    uint64_t taken = 0;
    for (int round = 0; round < 200000; round++) {
        struct record_header *record = whole_record(&place, next_random(random) % 100);
        uint64_t bytes = record->record_bytes;
        uint64_t flags = record->flags;
        uint8_t *raw = (uint8_t *)record;
        int edits = 1 + (int)(next_random(random) % 4);
        for (int i = 0; i < edits; i++) {
            uint64_t at = 32 + next_random(random) % (bytes - 32 < 160 ? bytes - 32 : 160);
            static const uint8_t edges[] = {0, 1, 0x7F, 0x80, 0xFF};
            raw[at] = next_random(random) % 2 ? edges[next_random(random) % sizeof edges]
                                              : (uint8_t)next_random(random);
        }
        record_write_frame(record, &place, bytes, 9, 2, (uint32_t)flags & ~SHMBUS_FLAG_PAYLOAD_CRC);
        uint64_t tables =
            (uint64_t)record->shape_words * 8 + record->id_bytes + record->schema_bytes;
        if (sizeof *record + tables <= bytes) {
            record_reseal(record, bytes);
        }
        if (read_record(record, bytes, &place, copy) == RECORD_OK) {
            taken++;
            CHECK(copy->header.index < copy->header.group_size);
            CHECK(copy->header.need >= 1 && copy->header.need <= copy->header.group_size);
            CHECK(copy->header.split < SHMBUS_MAX_SPLITS);
            CHECK((uint64_t)copy->header.meta_offset + copy->header.meta_bytes <= bytes);
            const uint64_t *shape = copy->shape;
            const uint8_t *schema = copy->schema;
            for (uint32_t f = 0; f < copy->header.field_count; f++) {
                struct schema_entry entry;
                memcpy(&entry, schema, sizeof entry);
                uint64_t size = entry.itemsize;
                for (uint32_t d = 1; d <= entry.ndim; d++) {
                    size *= shape[d];
                }
                CHECK(shape[0] + size <= bytes);
                schema += sizeof entry + entry.name_bytes + entry.dtype_bytes;
                shape += 1 + entry.ndim;
            }
        }
        free(record);
    }
    CHECK(taken > 0);
}

int main(void) {
    uint64_t random = test_seed();
    struct record_copy *copy = malloc(sizeof *copy);
    CHECK(copy != NULL);
    checksums_agree(&random);
    a_whole_record_is_read_back(copy);
    every_flipped_bit_is_found(copy);
    forged_records_with_right_checksums_stay_in_bounds(&random, copy);
    free(copy);
    puts("record_test: passed");
    return 0;
}
