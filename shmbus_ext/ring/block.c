/* Making, checking and unpacking a block (see block.h). */
#include "block.h"

#include <string.h>

#include "base/checksum.h"

#define HEADER_CRC_BYTES offsetof(struct block_header, header_crc)

/* ---- making one ---- */

/* The ring-independent part of a record's head. `record` holds the tables, maybe unaligned. */
static bool canonical_head(const void *record, uint64_t bytes, struct record_header *head) {
    if (bytes < sizeof *head) {
        return false;
    }
    memcpy(head, record, sizeof *head);
    if (head->record_bytes != bytes || record_tables_bytes(head) > bytes - sizeof *head) {
        return false;
    }
    atomic_store_explicit(&head->state, 0, memory_order_relaxed);
    head->frame_crc = 0;
    head->slot = 0;
    head->lane_number = 0;
    head->flags &= SHMBUS_FLAGS_KEPT;
    head->header_crc = record_header_crc(head, (const uint8_t *)record + sizeof *head);
    return true;
}

bool block_head_check(const void *record, uint64_t bytes, uint32_t *check) {
    struct record_header head;
    if (!canonical_head(record, bytes, &head)) {
        return false;
    }
    *check = head.header_crc;
    return true;
}

bool block_begin(struct block_maker *self, void *into, uint64_t room) {
    *self = (struct block_maker){
        .block = into, .room = room, .used = sizeof(struct block_header)};
    return room >= self->used;
}

bool block_add(struct block_maker *self, const void *record, uint64_t bytes) {
    if (self->count >= BLOCK_MAX_RECORDS || bytes > self->room - self->used ||
        bytes % SHMBUS_RECORD_ALIGN != 0) {
        return false;
    }
    /* Checksums cover the private copy, safe from concurrent writers. */
    uint8_t *to = self->block + self->used;
    memcpy(to, record, bytes);
    struct record_header head;
    if (!canonical_head(to, bytes, &head)) {
        return false;
    }
    memcpy(to, &head, sizeof head);
    self->crc = shmbus_crc32c(self->crc, to, bytes);
    self->used += bytes;
    self->count++;
    return true;
}

uint64_t block_end(struct block_maker *self, const uint8_t identity[SHMBUS_IDENTITY_BYTES]) {
    struct block_header header = {
        .magic = BLOCK_MAGIC,
        .version = BLOCK_VERSION,
        .layout_version = SHMBUS_LAYOUT_VERSION,
        .bytes = self->used,
        .count = self->count,
        .records_crc = self->crc,
    };
    memcpy(header.identity, identity, sizeof header.identity);
    header.header_crc = shmbus_crc32c(0, &header, HEADER_CRC_BYTES);
    memcpy(self->block, &header, sizeof header);
    return self->used;
}

/* ---- reading one ---- */

static bool fail(struct block_report *report, enum block_fault fault, uint32_t record,
                 uint64_t expected, uint64_t got) {
    *report = (struct block_report){fault, record, expected, got};
    return false;
}

static void place_cursor(struct block_cursor *cursor, const void *block,
                         const struct block_header *header) {
    cursor->at = (const uint8_t *)block + sizeof *header;
    cursor->end = (const uint8_t *)block + header->bytes;
    cursor->next = 0;
    cursor->count = header->count;
    static const uint8_t train_alone[] = {SHMBUS_SPLIT_TRAIN};
    cursor->splits = train_alone;
    cursor->split_count = 1;
}

bool block_open(const void *block, uint64_t bytes, struct block_header *header,
                struct block_cursor *cursor, struct block_report *report) {
    if (bytes < sizeof *header) {
        return fail(report, BLOCK_CUT, 0, sizeof *header, bytes);
    }
    memcpy(header, block, sizeof *header);
    if (header->magic != BLOCK_MAGIC) {
        return fail(report, BLOCK_NOT_ONE, 0, BLOCK_MAGIC, header->magic);
    }
    if (header->version != BLOCK_VERSION) {
        return fail(report, BLOCK_OTHER_VERSION, 0, BLOCK_VERSION, header->version);
    }
    if (header->layout_version != SHMBUS_LAYOUT_VERSION) {
        return fail(report, BLOCK_OTHER_LAYOUT, 0, SHMBUS_LAYOUT_VERSION, header->layout_version);
    }
    uint32_t crc = shmbus_crc32c(0, header, HEADER_CRC_BYTES);
    if (crc != header->header_crc) {
        return fail(report, BLOCK_DAMAGED, 0, header->header_crc, crc);
    }
    if (header->bytes != bytes) {
        return fail(report, BLOCK_CUT, 0, header->bytes, bytes);
    }
    if (header->count > BLOCK_MAX_RECORDS) {
        return fail(report, BLOCK_BAD_LENGTH, 0, BLOCK_MAX_RECORDS, header->count);
    }
    crc = shmbus_crc32c(0, (const uint8_t *)block + sizeof *header, bytes - sizeof *header);
    if (crc != header->records_crc) {
        return fail(report, BLOCK_DAMAGED, 0, header->records_crc, crc);
    }
    place_cursor(cursor, block, header);
    *report = (struct block_report){0};
    return true;
}

bool block_reopen(const void *block, uint64_t bytes, struct block_cursor *cursor) {
    struct block_header header;
    if (bytes < sizeof header) {
        return false;
    }
    memcpy(&header, block, sizeof header);
    if (header.magic != BLOCK_MAGIC || header.bytes != bytes) {
        return false;
    }
    place_cursor(cursor, block, &header);
    return true;
}

static bool is_canonical(const struct record_header *head) {
    return atomic_load_explicit(&head->state, memory_order_relaxed) == 0 && head->frame_crc == 0 &&
           head->slot == 0 && head->lane_number == 0 && head->producer_id != 0 &&
           (head->flags & ~SHMBUS_FLAGS_KEPT) == 0;
}

/* At most 64 fields; typical records have three. */
static bool two_fields_of_one_name(const struct record_copy *copy) {
    struct schema_entry entries[SHMBUS_MAX_FIELDS];
    const uint8_t *names[SHMBUS_MAX_FIELDS];
    const uint8_t *at = copy->schema;
    for (uint32_t i = 0; i < copy->header.field_count; i++) {
        memcpy(&entries[i], at, sizeof entries[i]);
        names[i] = at + sizeof entries[i];
        at = names[i] + entries[i].name_bytes + entries[i].dtype_bytes;
        for (uint32_t before = 0; before < i; before++) {
            if (entries[before].name_bytes == entries[i].name_bytes &&
                memcmp(names[before], names[i], entries[i].name_bytes) == 0) {
                return true;
            }
        }
    }
    return false;
}

const uint8_t *block_next(struct block_cursor *cursor, struct record_copy *copy,
                          struct block_report *report) {
    const uint8_t *image = cursor->at;
    const uint64_t left = (uint64_t)(cursor->end - image);
    struct record_header *head = &copy->header;
    *report = (struct block_report){0};
    if (cursor->next == cursor->count) {
        if (left != 0) {
            (void)fail(report, BLOCK_BAD_LENGTH, cursor->count, 0, left);
        }
        return NULL;
    }
    if (left < sizeof *head) {
        (void)fail(report, BLOCK_BAD_LENGTH, cursor->next, sizeof *head, left);
        return NULL;
    }
    memcpy(head, image, sizeof *head);
    if (head->record_bytes < sizeof *head || head->record_bytes > left ||
        head->record_bytes % SHMBUS_RECORD_ALIGN != 0) {
        (void)fail(report, BLOCK_BAD_LENGTH, cursor->next, left, head->record_bytes);
        return NULL;
    }
    enum record_verdict verdict =
        is_canonical(head) ? record_read_body(image, copy) : RECORD_BAD_FRAME;
    if (verdict != RECORD_OK) {
        (void)fail(report, verdict == RECORD_BAD_PAYLOAD ? BLOCK_BAD_PAYLOAD : BLOCK_BAD_RECORD,
                   cursor->next, 0, 0);
        return NULL;
    }
    if (two_fields_of_one_name(copy)) {
        (void)fail(report, BLOCK_TWO_FIELDS, cursor->next, 0, 0);
        return NULL;
    }
    const uint32_t split =
        head->split < cursor->split_count ? cursor->splits[head->split] : SHMBUS_MAX_SPLITS;
    if (split >= SHMBUS_MAX_SPLITS) {
        (void)fail(report, BLOCK_OTHER_SPLIT, cursor->next, 0, head->split);
        return NULL;
    }
    head->split = (uint16_t)split;
    cursor->at += head->record_bytes;
    cursor->next++;
    return image;
}

bool block_skip(struct block_cursor *cursor) {
    struct record_header head;
    uint64_t left = (uint64_t)(cursor->end - cursor->at);
    if (cursor->next == cursor->count || left < sizeof head) {
        return false;
    }
    memcpy(&head, cursor->at, sizeof head);
    if (head.record_bytes < sizeof head || head.record_bytes > left) {
        return false;
    }
    cursor->at += head.record_bytes;
    cursor->next++;
    return true;
}

void block_write(struct record_header *to, const struct record_place *place,
                 const struct record_copy *copy, const uint8_t *image, uint64_t producer_id,
                 uint32_t slot, uint32_t more_flags) {
    record_copy_image(to, place, image, copy->header.record_bytes, producer_id, slot,
                      copy->header.flags | more_flags);
    record_write_head(to, copy);
}
