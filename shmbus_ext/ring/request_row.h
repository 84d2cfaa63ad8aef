/* The words of the request lane, and a row as a process reads it.
 *
 * Invariant: what a row says is copied, bounded and checked before it is used, and the row's word is
 * looked at again after what it points to was read. */
#ifndef SHMBUS_RING_REQUEST_ROW_H
#define SHMBUS_RING_REQUEST_ROW_H

#include <stdbool.h>
#include <stdint.h>

#include "segment.h"

#define REQUEST_NUMBER_BITS 28u
#define REQUEST_NUMBER_MASK ((UINT64_C(1) << REQUEST_NUMBER_BITS) - 1)
#define REQUEST_PRODUCER_BITS 34u
#define REQUEST_PRODUCER_MASK ((UINT64_C(1) << REQUEST_PRODUCER_BITS) - 1)
#define REQUEST_COUNT_MASK ((UINT64_C(1) << (64 - REQUEST_NUMBER_BITS)) - 1)
/* The producer of a sample that nobody will make any more. */
#define REQUEST_NOBODY REQUEST_PRODUCER_MASK

static inline uint64_t request_claim_word(enum request_kind kind, uint64_t producer, uint64_t number) {
    return (uint64_t)kind << 62 | (producer & REQUEST_PRODUCER_MASK) << REQUEST_NUMBER_BITS |
           (number & REQUEST_NUMBER_MASK);
}

static inline enum request_kind request_kind_of(uint64_t claim) {
    return (enum request_kind)(claim >> 62);
}

static inline uint64_t request_producer_of(uint64_t claim) {
    return claim >> REQUEST_NUMBER_BITS & REQUEST_PRODUCER_MASK;
}

static inline uint32_t request_state_of(uint64_t word) {
    return (uint32_t)(word & 3);
}

static inline uint64_t request_number_of(uint64_t word) {
    return word >> 2;
}

/* The claim of a sample that nobody has, and the word of a row of which nobody has had more. */
uint64_t request_open_word(uint64_t number);
uint64_t request_next_word(uint64_t number, uint32_t sample);

uint32_t request_row_crc(const struct request_row *row);

/* The number of a row if it is open, else 0. */
uint64_t request_open_row(const struct segment *segment, uint32_t index);

/* A row's own numbers, copied and bounded. False where the row is not open under this number, or is
 * damaged. */
bool request_copy_row(const struct segment *segment, uint32_t index, uint64_t number,
                      struct request_row *copy);

#endif
