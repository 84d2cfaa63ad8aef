/* How the request lane divides its bytes.
 *
 * Invariant: everything follows from the number of bytes between the tables and the extents, which is
 * part of the geometry: rows first, the rest is for prompts. So the lane states no size of its own
 * that a reader would have to trust. */
#ifndef SHMBUS_RING_REQUEST_PARTS_H
#define SHMBUS_RING_REQUEST_PARTS_H

#include <stdbool.h>
#include <stdint.h>

#include "layout.h"

struct request_parts {
    struct request_lane *lane;
    struct request_row *rows;
    _Atomic uint32_t *order; /* rows of each priority, in the order of their offers */
    struct request_cell *cells;
    uint64_t *block_bits; /* of cells' blocks: 1 for taken */
    uint64_t *unit_bits;
    uint8_t *units;
    uint32_t row_count;
    uint32_t block_count;
    uint32_t unit_count;
};

/* The parts of so many bytes at this place; only their numbers where `at` is NULL. False where the
 * bytes are too few. */
bool request_divide(struct request_parts *parts, uint8_t *at, uint64_t bytes);

#endif
