/* Layout, checksums and bounds of one record (see record.h and LAYOUT.md). */
#include "record.h"

#include <string.h>

#include "base/checksum.h"
#include "base/clock.h"

#define FRAME_AT 8u
#define FRAME_BYTES 24u
#define HEADER_CRC_AT 8u
#define HEADER_CRC_BYTES (offsetof(struct record_header, header_crc) - HEADER_CRC_AT)

static uint32_t frame_crc(const struct record_header *record, const struct record_place *place) {
    uint64_t salted[5] = {((uint64_t)place->extent << 32) | place->generation, place->offset};
    memcpy(&salted[2], (const uint8_t *)record + FRAME_AT, FRAME_BYTES);
    return shmbus_crc32c(0, salted, sizeof salted);
}

bool record_plan(struct record_spec *spec) {
    uint64_t at = sizeof(struct record_header) + (uint64_t)spec->shape_words * 8 + spec->id_bytes +
                  spec->schema_bytes;
    if (at > UINT32_MAX || spec->meta_bytes > UINT32_MAX) {
        return false;
    }
    spec->meta_offset = (uint32_t)at;
    at = shmbus_align_up(at + spec->meta_bytes, SHMBUS_RECORD_ALIGN);
    uint64_t payload_start = at;
    uint64_t *shape = spec->shape;
    for (uint32_t i = 0; i < spec->field_count; i++) {
        shape[0] = at;
        shape += 1 + spec->field_ndim[i];
        if (spec->field_bytes[i] > (UINT64_C(1) << 48) || at > (UINT64_C(1) << 48)) {
            return false;
        }
        at = shmbus_align_up(at + spec->field_bytes[i], SHMBUS_RECORD_ALIGN);
    }
    spec->payload_bytes = at - payload_start;
    spec->record_bytes = at;
    return true;
}

void record_write_frame(struct record_header *record, const struct record_place *place,
                        uint64_t record_bytes, uint64_t producer_id, uint32_t slot,
                        uint32_t flags) {
    record->record_bytes = record_bytes;
    record->producer_id = producer_id;
    record->slot = slot;
    record->flags = flags;
    record->frame_crc = frame_crc(record, place);
}

void record_write_body(struct record_header *record, const struct record_spec *spec) {
    record->policy_version = spec->policy_version;
    record->score = spec->score;
    record->group_size = (uint16_t)spec->group_size;
    record->need = (uint16_t)(spec->need == 0 ? spec->group_size : spec->need);
    record->index = (uint16_t)spec->index;
    record->split = (uint16_t)spec->split;
    record->round = spec->round;
    record->meta_bytes = (uint32_t)spec->meta_bytes;
    record->meta_offset = spec->meta_offset;
    record->id_bytes = (uint16_t)spec->id_bytes;
    record->field_count = (uint16_t)spec->field_count;
    record->shape_words = spec->shape_words;
    record->schema_bytes = spec->schema_bytes;
    record->payload_crc = 0;
    record->payload_bytes = spec->payload_bytes;
    record->version_span = spec->version_span;
    uint8_t *at = (uint8_t *)record + sizeof *record;
    memcpy(at, spec->shape, (size_t)spec->shape_words * 8);
    at += (size_t)spec->shape_words * 8;
    memcpy(at, spec->id, spec->id_bytes);
    at += spec->id_bytes;
    memcpy(at, spec->schema, spec->schema_bytes);
}

/* The checksum of a header with `bytes` bytes of tables. */
static uint32_t header_crc(const struct record_header *header, const void *tables, uint64_t bytes) {
    uint32_t crc = shmbus_crc32c(0, (const uint8_t *)header + HEADER_CRC_AT, HEADER_CRC_BYTES);
    return shmbus_crc32c(crc, tables, bytes);
}

uint32_t record_header_crc(const struct record_header *header, const void *tables) {
    return header_crc(header, tables, record_tables_bytes(header));
}

/* No length overwritten by another process leads out of the record: an invalid length gets a
 * checksum that no reader accepts. frame_crc protects the record's own length. */
void record_reseal(struct record_header *record, uint64_t bytes) {
    const uint64_t tables = record_tables_bytes(record);
    record->header_crc =
        header_crc(record, record + 1, tables <= bytes - sizeof *record ? tables : 0);
}

void record_copy_image(struct record_header *to, const struct record_place *place,
                       const void *image, uint64_t record_bytes, uint64_t producer_id,
                       uint32_t slot, uint32_t flags) {
    memcpy((uint8_t *)to + FRAME_AT, (const uint8_t *)image + FRAME_AT, record_bytes - FRAME_AT);
    record_write_frame(to, place, record_bytes, producer_id, slot, flags);
}

void record_write_head(struct record_header *record, const struct record_copy *copy) {
    const size_t behind = FRAME_AT + FRAME_BYTES;
    memcpy((uint8_t *)record + behind, (const uint8_t *)&copy->header + behind,
           sizeof *record - behind);
    memcpy((uint8_t *)record + sizeof *record, copy->scratch, record_tables_bytes(&copy->header));
}

void record_close(struct record_header *record, uint64_t bytes, uint64_t sequence,
                  uint64_t lane_number) {
    record->sequence = sequence;
    record->lane_number = lane_number;
    record->committed_ns = clock_monotonic_ns();
    if (record->flags & SHMBUS_FLAG_PAYLOAD_CRC) {
        const uint32_t from = record->meta_offset;
        record->payload_crc =
            from <= bytes ? shmbus_crc32c(0, (const uint8_t *)record + from, bytes - from) : 0;
    }
    record_reseal(record, bytes);
}

enum record_verdict record_read_frame(const struct record_header *shared, uint64_t room,
                                      const struct record_place *place,
                                      struct record_header *copy) {
    if (room < sizeof *shared) {
        return RECORD_BAD_FRAME;
    }
    /* SYNC: record-published. The reads vouched for by the state follow the state.
     * SYNC: record-moved. A first copy in state RELEASED implies an exposed second copy. */
    uint32_t state = atomic_load_explicit(&shared->state, memory_order_acquire);
    memcpy(copy, shared, sizeof *copy);
    atomic_store_explicit(&copy->state, state, memory_order_relaxed);
    if (copy->frame_crc != frame_crc(copy, place) || copy->record_bytes > room ||
        copy->record_bytes < sizeof *shared || copy->record_bytes % SHMBUS_RECORD_ALIGN != 0) {
        return RECORD_BAD_FRAME;
    }
    return RECORD_OK;
}

/* Returns true if a field lies inside the record; a dimension of 0 makes its bytes 0. */
static bool field_fits(const struct schema_entry *entry, const uint64_t *shape, uint64_t lowest,
                       uint64_t highest) {
    uint64_t bytes = entry->itemsize;
    bool empty = false, too_large = false;
    for (uint32_t d = 1; d <= entry->ndim; d++) {
        if (shape[d] > INT64_MAX) {
            return false;
        }
        empty = empty || shape[d] == 0;
        too_large = too_large || __builtin_mul_overflow(bytes, shape[d], &bytes) || bytes > highest;
    }
    if (empty) {
        bytes = 0;
    } else if (too_large) {
        return false;
    }
    return shape[0] >= lowest && shape[0] <= highest && bytes <= highest - shape[0] &&
           shape[0] % SHMBUS_RECORD_ALIGN == 0;
}

static bool tables_hold(const struct record_copy *copy) {
    const struct record_header *header = &copy->header;
    const uint8_t *at = copy->schema;
    const uint8_t *end = at + header->schema_bytes;
    uint64_t words = 0;
    uint64_t lowest = (uint64_t)header->meta_offset + header->meta_bytes;
    for (uint32_t i = 0; i < header->field_count; i++) {
        struct schema_entry entry;
        if ((uint64_t)(end - at) < sizeof entry) {
            return false;
        }
        memcpy(&entry, at, sizeof entry);
        at += sizeof entry;
        uint64_t names = (uint64_t)entry.name_bytes + entry.dtype_bytes;
        if (entry.name_bytes == 0 || entry.dtype_bytes == 0 || entry.ndim > SHMBUS_MAX_NDIM ||
            (uint64_t)(end - at) < names || words + 1 + entry.ndim > header->shape_words ||
            !field_fits(&entry, copy->shape + words, lowest, header->record_bytes)) {
            return false;
        }
        at += names;
        words += 1u + entry.ndim;
    }
    return at == end && words == header->shape_words;
}

/* Returns true if the place in the group and the policy versions are valid. */
static bool group_holds(const struct record_header *header) {
    return header->group_size >= 1 && header->group_size <= SHMBUS_MAX_GROUP_SIZE &&
           header->need >= 1 && header->need <= header->group_size &&
           header->index < header->group_size && header->split < SHMBUS_MAX_SPLITS &&
           header->policy_version <= INT64_MAX - (int64_t)header->version_span;
}

enum record_verdict record_read_tables(const void *shared, struct record_copy *copy) {
    const struct record_header *header = &copy->header;
    uint64_t tables = record_tables_bytes(header);
    if (header->id_bytes == 0 || header->id_bytes > SHMBUS_MAX_ID_BYTES ||
        header->field_count > SHMBUS_MAX_FIELDS || header->shape_words > SHMBUS_MAX_SHAPE_WORDS ||
        header->schema_bytes > SHMBUS_MAX_SCHEMA_BYTES ||
        sizeof *header + tables > header->record_bytes ||
        header->meta_offset != sizeof *header + tables ||
        header->meta_bytes > header->record_bytes - header->meta_offset) {
        return RECORD_BAD_HEADER;
    }
    memcpy(copy->scratch, (const uint8_t *)shared + sizeof *header, tables);
    copy->shape = (const uint64_t *)(const void *)copy->scratch;
    copy->id = (const char *)copy->scratch + (size_t)header->shape_words * 8;
    copy->schema = (const uint8_t *)copy->id + header->id_bytes;
    if (record_header_crc(header, copy->scratch) != header->header_crc || !group_holds(header) ||
        !record_flags_hold(header->flags) || !tables_hold(copy)) {
        return RECORD_BAD_HEADER;
    }
    return RECORD_OK;
}

enum record_verdict record_read_body(const void *shared, struct record_copy *copy) {
    const struct record_header *header = &copy->header;
    enum record_verdict verdict = record_read_tables(shared, copy);
    if (verdict != RECORD_OK) {
        return verdict;
    }
    if ((header->flags & SHMBUS_FLAG_PAYLOAD_CRC) &&
        shmbus_crc32c(0, (const uint8_t *)shared + header->meta_offset,
                      header->record_bytes - header->meta_offset) != header->payload_crc) {
        return RECORD_BAD_PAYLOAD;
    }
    return RECORD_OK;
}
