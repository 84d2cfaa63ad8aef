/* A record of any bytes: read to its end, never out of bounds, never beyond its limits.
 *
 * Input: the record. A first byte below 192 has both checksums made right. */
#include "fuzz.h"

#define LARGEST (64u << 10)

static struct record_copy copy;

static void check_fields(const struct record_header *header, uint64_t bytes) {
    const uint64_t *shape = copy.shape;
    const uint8_t *schema = copy.schema;
    CHECK((uint64_t)header->meta_offset + header->meta_bytes <= bytes);
    CHECK(header->index < header->group_size && header->group_size <= SHMBUS_MAX_GROUP_SIZE);
    CHECK(header->need >= 1 && header->need <= header->group_size);
    CHECK(header->split < SHMBUS_MAX_SPLITS);
    CHECK(header->policy_version <= INT64_MAX - (int64_t)header->version_span);
    for (uint32_t f = 0; f < header->field_count; f++) {
        struct schema_entry entry;
        memcpy(&entry, schema, sizeof entry);
        uint64_t size = entry.itemsize;
        for (uint32_t d = 1; d <= entry.ndim; d++) {
            size *= shape[d];
        }
        CHECK(shape[0] <= bytes && size <= bytes - shape[0]);
        schema += sizeof entry + entry.name_bytes + entry.dtype_bytes;
        shape += 1 + entry.ndim;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct record_place place = {1, 2, 640};
    if (size < 1 + sizeof(struct record_header) || size > LARGEST) {
        return 0;
    }
    uint8_t way = *data++;
    uint64_t bytes = shmbus_align_up(--size, SHMBUS_RECORD_ALIGN);
    struct record_header *record = aligned_alloc(SHMBUS_RECORD_ALIGN, (size_t)bytes);
    CHECK(record != NULL);
    memset((void *)record, 0, (size_t)bytes);
    memcpy((void *)record, data, size);
    if (way < 192) {
        uint32_t flags = way < 128 ? record->flags & ~SHMBUS_FLAG_PAYLOAD_CRC : record->flags;
        record_write_frame(record, &place, bytes, record->producer_id, record->slot, flags);
        record->meta_offset = way % 2 ? record->meta_offset
                                      : (uint32_t)sizeof *record + record->shape_words * 8u +
                                            record->id_bytes + record->schema_bytes;
        if ((uint64_t)record->shape_words * 8 + record->id_bytes + record->schema_bytes <=
            bytes - sizeof *record) {
            record_reseal(record, bytes);
        }
    }
    if (record_read_frame(record, bytes, &place, &copy.header) == RECORD_OK &&
        record_read_body(record, &copy) == RECORD_OK) {
        check_fields(&copy.header, bytes);
    }
    free(record);
    return 0;
}
