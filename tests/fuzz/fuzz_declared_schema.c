/* A declared schema of any bytes: in the part of a segment, damaged or under a good checksum, and
 * as the bytes of a schema. An accepted schema lies inside its bytes and its limits, and reads the
 * same again.
 *
 * Input: kind of damage (1), its place (2), and the bytes of the schema. */
#include "fuzz.h"
#include "ring/segment.h"

static void check_field(const struct declared_fields *fields, uint32_t at, const uint8_t *bytes,
                        uint32_t count) {
    const struct declared_field *field = &fields->fields[at];
    const uint8_t *end = bytes + count;
    const uint8_t *name = (const uint8_t *)field->name, *dtype = (const uint8_t *)field->dtype;
    CHECK(field->name_bytes >= 1 && field->name_bytes <= SHMBUS_MAX_NAME_BYTES);
    CHECK(field->dtype_bytes >= 1 && field->dtype_bytes <= SHMBUS_MAX_DTYPE_BYTES);
    CHECK(field->ndim <= SHMBUS_MAX_NDIM && field->itemsize >= 1);
    CHECK(name >= bytes && name + field->name_bytes <= end);
    CHECK(dtype >= bytes && dtype + field->dtype_bytes <= end);
    CHECK(field->dimensions >= bytes && field->dimensions + field->ndim * 8 <= end);
    for (uint32_t d = 0; d < field->ndim; d++) {
        int64_t size = declared_schema_dimension(field, d);
        CHECK(size > SHMBUS_DIMENSION_NAMED - (int64_t)fields->dimension_names);
    }
    for (uint32_t other = 0; other < at; other++) {
        const struct declared_field *before = &fields->fields[other];
        CHECK(before->name_bytes != field->name_bytes ||
              memcmp(before->name, field->name, field->name_bytes) != 0);
    }
}

static bool check_parse(const uint8_t *bytes, uint32_t count) {
    struct declared_fields *fields = malloc(sizeof *fields);
    CHECK(fields != NULL);
    bool accepted = declared_schema_parse(bytes, count, fields);
    if (accepted) {
        CHECK(fields->count >= 1 && fields->count <= SHMBUS_MAX_FIELDS);
        CHECK(fields->dimension_names <= SHMBUS_MAX_DIMENSION_NAMES);
        for (uint32_t i = 0; i < fields->dimension_names; i++) {
            CHECK(fields->names[i] >= bytes && fields->names[i][0] >= 1);
            CHECK(fields->names[i] + 1 + fields->names[i][0] <= bytes + count);
        }
        for (uint32_t i = 0; i < fields->count; i++) {
            check_field(fields, i, bytes, count);
        }
    }
    free(fields);
    return accepted;
}

/* Blocks of exactly their size: a sanitizer sees a byte too many. */
static void check_part(const struct declared_part *part, const uint8_t *bytes, uint32_t count,
                       bool sound) {
    uint8_t *text = malloc(SHMBUS_DECLARED_BYTES);
    CHECK(text != NULL);
    uint32_t found;
    enum declared_status status = declared_schema_read(part, text, &found);
    if (sound) {
        CHECK(status == (count == 0 ? DECLARED_NONE : DECLARED_OK) && found == count);
        CHECK(memcmp(text, bytes, count) == 0);
    }
    if (status == DECLARED_OK) {
        CHECK(found >= 1 && found <= SHMBUS_DECLARED_BYTES);
        uint8_t *exact = malloc(found);
        CHECK(exact != NULL);
        memcpy(exact, text, found);
        CHECK(check_parse(exact, found) == check_parse(text, found));
        free(exact);
    }
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 3) {
        return 0;
    }
    uint32_t where = data[1] | (uint32_t)data[2] << 8;
    const uint8_t *bytes = data + 3;
    uint32_t count = size - 3 > SHMBUS_DECLARED_BYTES ? SHMBUS_DECLARED_BYTES : (uint32_t)(size - 3);
    struct declared_part *part = malloc(sizeof *part);
    CHECK(part != NULL);
    memset(part, 0, sizeof *part);
    declared_schema_write(part, bytes, count);
    check_part(part, bytes, count, true);
    ((uint8_t *)part)[where % sizeof *part] ^= data[0];
    check_part(part, bytes, count, data[0] == 0);
    free(part);
    check_parse(bytes, count);
    return 0;
}
