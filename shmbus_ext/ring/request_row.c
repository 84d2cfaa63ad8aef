/* The words of the request lane (see requests.h). */
#include "requests.h"

#include "base/checksum.h"
#include "base/failpoints.h"

uint64_t request_open_word(uint64_t number) {
    return request_claim_word(CELL_IS_OPEN, 0, number);
}

uint64_t request_next_word(uint64_t number, uint32_t sample) {
    return (number & REQUEST_NUMBER_MASK) << 32 | sample;
}

uint32_t request_row_crc(const struct request_row *row) {
    return shmbus_crc32c(0, &row->place,
                         offsetof(struct request_row, crc) - offsetof(struct request_row, place));
}

bool request_copy_row(const struct segment *segment, uint32_t index, uint64_t number,
                      struct request_row *copy) {
    const struct request_parts *parts = &segment->requests;
    if (index >= parts->row_count) {
        return false;
    }
    const struct request_row *row = &parts->rows[index];
    /* SYNC: request-offered. */
    uint64_t word = ACQUIRE(row->word);
    if (request_state_of(word) != REQUEST_OPEN || request_number_of(word) != number) {
        return false;
    }
    memcpy(&copy->place, &row->place,
           offsetof(struct request_row, next) - offsetof(struct request_row, place));
    uint64_t cells = (uint64_t)parts->block_count * SHMBUS_REQUEST_CELLS_A_BLOCK;
    uint64_t data = (uint64_t)parts->unit_count * SHMBUS_REQUEST_UNIT;
    return copy->crc == request_row_crc(copy) && copy->group_size >= 1 &&
           copy->first_cell + (uint64_t)copy->group_size <= cells &&
           (uint64_t)copy->first_unit * SHMBUS_REQUEST_UNIT + copy->data_bytes <= data &&
           copy->id_bytes <= copy->data_bytes && copy->id_bytes >= 1 &&
           copy->id_bytes <= SHMBUS_MAX_ID_BYTES && copy->split < SHMBUS_MAX_SPLITS &&
           copy->level < SHMBUS_REQUEST_LEVELS;
}

uint64_t request_open_row(const struct segment *segment, uint32_t index) {
    uint64_t word = ACQUIRE(segment->requests.rows[index].word);
    return request_state_of(word) == REQUEST_OPEN ? request_number_of(word) : 0;
}

bool request_change_word(const struct request_parts *parts, uint32_t index, uint64_t from,
                         uint64_t to) {
    struct request_row *chunk = &parts->rows[index - index % SHMBUS_REQUEST_CHUNK];
    /* SYNC: request-changed. */
    atomic_fetch_add_explicit(&chunk->begun, 1, memory_order_relaxed);
    bool changed = atomic_compare_exchange_strong_explicit(
        &parts->rows[index].word, &from, to, memory_order_acq_rel, memory_order_acquire);
    FAILPOINT("request-changing");
    atomic_fetch_add_explicit(&chunk->done, 1, memory_order_release);
    return changed;
}

uint64_t request_changes(const struct request_parts *parts, uint32_t chunk) {
    const struct request_row *first = &parts->rows[chunk * SHMBUS_REQUEST_CHUNK];
    /* SYNC: request-changed. */
    uint64_t done = ACQUIRE(first->done);
    uint64_t begun = ACQUIRE(first->begun);
    return begun == done ? done : REQUEST_CHANGES;
}
