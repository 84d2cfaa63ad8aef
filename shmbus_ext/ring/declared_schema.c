/* Reading, bounding and writing the schema that a bus declares (see segment.h). */
#include "segment.h"

#include "base/checksum.h"

/* The bytes left to parse. */
struct rest {
    const uint8_t *at;
    uint64_t bytes;
};

/* Takes the next `bytes` bytes; NULL if fewer remain. */
static const uint8_t *take(struct rest *rest, uint64_t bytes) {
    if (bytes > rest->bytes) {
        return NULL;
    }
    const uint8_t *found = rest->at;
    rest->at += bytes;
    rest->bytes -= bytes;
    return found;
}

static bool parse_names(struct rest *rest, struct declared_fields *fields) {
    for (uint32_t i = 0; i < fields->dimension_names; i++) {
        const uint8_t *length = take(rest, 1);
        if (length == NULL || *length == 0 || take(rest, *length) == NULL) {
            return false;
        }
        fields->names[i] = length;
    }
    return true;
}

static bool dimensions_hold(const struct declared_field *field, uint32_t dimension_names) {
    for (uint32_t d = 0; d < field->ndim; d++) {
        int64_t size = declared_schema_dimension(field, d);
        if (size < SHMBUS_DIMENSION_NAMED - (int64_t)dimension_names + 1) {
            return false;
        }
    }
    return true;
}

static bool parse_field(struct rest *rest, uint32_t dimension_names, struct declared_field *field) {
    struct declared_entry entry;
    const uint8_t *at = take(rest, sizeof entry);
    if (at == NULL) {
        return false;
    }
    memcpy(&entry, at, sizeof entry);
    field->name_bytes = entry.name_bytes;
    field->dtype_bytes = entry.dtype_bytes;
    field->itemsize = entry.itemsize;
    field->ndim = entry.ndim;
    field->flags = entry.flags;
    field->name = (const char *)take(rest, entry.name_bytes);
    field->dtype = (const char *)take(rest, entry.dtype_bytes);
    bool bounded = entry.name_bytes >= 1 && entry.name_bytes <= SHMBUS_MAX_NAME_BYTES &&
                   entry.dtype_bytes >= 1 && entry.dtype_bytes <= SHMBUS_MAX_DTYPE_BYTES &&
                   entry.ndim <= SHMBUS_MAX_NDIM && entry.itemsize >= 1;
    if (!bounded || field->name == NULL || field->dtype == NULL) {
        return false;
    }
    field->dimensions = take(rest, (uint64_t)entry.ndim * sizeof(int64_t));
    return field->dimensions != NULL && dimensions_hold(field, dimension_names) &&
           (entry.ndim == 0 || (entry.flags & SHMBUS_DECLARED_ANY_SHAPE) == 0);
}

static bool is_named_before(const struct declared_fields *fields, uint32_t at) {
    const struct declared_field *field = &fields->fields[at];
    for (uint32_t i = 0; i < at; i++) {
        const struct declared_field *other = &fields->fields[i];
        if (other->name_bytes == field->name_bytes &&
            memcmp(other->name, field->name, field->name_bytes) == 0) {
            return true;
        }
    }
    return false;
}

bool declared_schema_parse(const uint8_t *bytes, uint32_t count, struct declared_fields *fields) {
    struct rest rest = {bytes, count};
    struct declared_head head;
    const uint8_t *at = take(&rest, sizeof head);
    if (at == NULL || count > SHMBUS_DECLARED_BYTES) {
        return false;
    }
    memcpy(&head, at, sizeof head);
    if (head.field_count < 1 || head.field_count > SHMBUS_MAX_FIELDS ||
        head.dimension_names > SHMBUS_MAX_DIMENSION_NAMES) {
        return false;
    }
    fields->count = head.field_count;
    fields->dimension_names = head.dimension_names;
    if (!parse_names(&rest, fields)) {
        return false;
    }
    for (uint32_t i = 0; i < fields->count; i++) {
        if (!parse_field(&rest, fields->dimension_names, &fields->fields[i]) ||
            is_named_before(fields, i)) {
            return false;
        }
    }
    return rest.bytes == 0;
}

void declared_schema_write(struct declared_part *part, const void *text, uint32_t bytes) {
    if (bytes > 0) {
        memcpy(part->text, text, bytes);
    }
    part->bytes = bytes;
    part->crc = shmbus_crc32c(0, part->text, bytes);
}

enum declared_status declared_schema_read(const struct declared_part *part, uint8_t *text,
                                          uint32_t *bytes) {
    uint32_t head[2]; /* bytes, crc: private copy, since the segment may change */
    memcpy(head, part, sizeof head);
    *bytes = head[0];
    if (head[0] == 0) {
        return DECLARED_NONE;
    }
    if (head[0] > SHMBUS_DECLARED_BYTES) {
        return DECLARED_DAMAGED;
    }
    memcpy(text, part->text, head[0]);
    return shmbus_crc32c(0, text, head[0]) == head[1] ? DECLARED_OK : DECLARED_DAMAGED;
}
