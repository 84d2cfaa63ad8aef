/* The schema that a bus declares: which fields its records have, of which dtype and dimensions.
 *
 * Invariants:
 *  - The creator writes it before the magic, and nobody changes it.
 *  - A reader copies it, checks its checksum, and bounds each part of the copy before it uses it. */
#ifndef SHMBUS_RING_DECLARED_SCHEMA_H
#define SHMBUS_RING_DECLARED_SCHEMA_H

#include <stdbool.h>
#include <stdint.h>

#include "layout.h"

/* One field; what it points at lies in the bytes that were parsed. */
struct declared_field {
    const char *name;
    const char *dtype;
    const uint8_t *dimensions; /* i64 each, unaligned: declared_schema_dimension reads one */
    uint16_t name_bytes;
    uint16_t dtype_bytes;
    uint32_t itemsize;
    uint8_t ndim;
    uint8_t flags;
};

struct declared_fields {
    uint32_t count;
    uint32_t dimension_names;
    const uint8_t *names[SHMBUS_MAX_DIMENSION_NAMES]; /* each a length and so many bytes */
    struct declared_field fields[SHMBUS_MAX_FIELDS];
};

/* False where the bytes are no schema; then nothing of `fields` may be used. */
bool declared_schema_parse(const uint8_t *bytes, uint32_t count, struct declared_fields *fields);

/* A size, SHMBUS_DIMENSION_FREE, or SHMBUS_DIMENSION_NAMED less the number of a name. */
int64_t declared_schema_dimension(const struct declared_field *field, uint32_t dimension);

/* For the creator, before the magic; at most SHMBUS_DECLARED_BYTES. */
void declared_schema_write(struct declared_part *part, const void *text, uint32_t bytes);

enum declared_status {
    DECLARED_NONE = 0,
    DECLARED_OK,
    DECLARED_DAMAGED, /* its length or its checksum is wrong */
};

/* Copies what the segment says. SHMBUS_DECLARED_BYTES have room in `text`. */
enum declared_status declared_schema_read(const struct declared_part *part, uint8_t *text,
                                          uint32_t *bytes);

#endif
