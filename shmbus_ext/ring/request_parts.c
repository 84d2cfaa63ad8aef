/* Division of the request lane's bytes (see segment.h). */
#include "segment.h"

bool request_divide(struct request_parts *parts, uint8_t *at, uint64_t bytes) {
    uint64_t rows = bytes / SHMBUS_REQUEST_ROW_SHARE;
    rows = rows < SHMBUS_REQUEST_MIN_ROWS   ? SHMBUS_REQUEST_MIN_ROWS
           : rows > SHMBUS_REQUEST_MAX_ROWS ? SHMBUS_REQUEST_MAX_ROWS
                                            : rows;
    rows = shmbus_align_up(rows, SHMBUS_REQUEST_MIN_ROWS);
    uint64_t blocks = rows * SHMBUS_REQUEST_CELLS_A_ROW / SHMBUS_REQUEST_CELLS_A_BLOCK;
    uint64_t block_words = (blocks + 63) / 64;
    uint64_t fixed = sizeof(struct request_lane) + rows * sizeof(struct request_row) +
                     shmbus_align_up(SHMBUS_REQUEST_LEVELS * rows * sizeof(uint32_t), 64) +
                     blocks * SHMBUS_REQUEST_CELLS_A_BLOCK * sizeof(struct request_cell) +
                     shmbus_align_up(block_words * 8, 64);
    if (bytes < fixed + 3 * SHMBUS_REQUEST_UNIT) {
        return false;
    }
    /* A bit for each unit, rounded up to a cache line of bits. */
    uint64_t units = (bytes - fixed - 2 * SHMBUS_REQUEST_UNIT) * 8 / (8 * SHMBUS_REQUEST_UNIT + 1);
    *parts = (struct request_parts){.row_count = (uint32_t)rows,
                                    .block_count = (uint32_t)blocks,
                                    .unit_count = (uint32_t)units};
    if (at != NULL) {
        parts->lane = (struct request_lane *)at;
        at += sizeof(struct request_lane);
        parts->rows = (struct request_row *)at;
        at += rows * sizeof(struct request_row);
        parts->order = (_Atomic uint32_t *)at;
        at += shmbus_align_up(SHMBUS_REQUEST_LEVELS * rows * sizeof(uint32_t), 64);
        parts->cells = (struct request_cell *)at;
        at += blocks * SHMBUS_REQUEST_CELLS_A_BLOCK * sizeof(struct request_cell);
        parts->block_bits = (uint64_t *)at;
        at += shmbus_align_up(block_words * 8, 64);
        parts->unit_bits = (uint64_t *)at;
        at += shmbus_align_up((units + 63) / 64 * 8, 64);
        parts->units = at;
    }
    return true;
}
