/* What tells one bus from all others, of whatever node and time: random bits, as digits too. */
#ifndef SHMBUS_RING_IDENTITY_H
#define SHMBUS_RING_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/random.h>

#include "layout.h"

#define IDENTITY_TEXT_BYTES (2 * SHMBUS_IDENTITY_BYTES + 1)

static inline void identity_text(char text[IDENTITY_TEXT_BYTES],
                                 const uint8_t identity[SHMBUS_IDENTITY_BYTES]) {
    for (size_t i = 0; i < SHMBUS_IDENTITY_BYTES; i++) {
        snprintf(text + 2 * i, 3, "%02x", identity[i]);
    }
}

/* Of the bus that a producer's records were put onto: this one, or one that it was restored from. */
static inline const uint8_t *identity_of_producer(const struct bus_header *header,
                                                  uint64_t producer_id) {
    for (uint32_t i = 0; i < SHMBUS_ANCESTORS; i++) {
        if (producer_id < header->ancestors[i].producers) {
            return header->ancestors[i].identity;
        }
    }
    return header->identity;
}

/* A new one, and its text; false with errno. */
static inline bool identity_make(uint8_t identity[SHMBUS_IDENTITY_BYTES],
                                 char text[IDENTITY_TEXT_BYTES]) {
    if (getrandom(identity, SHMBUS_IDENTITY_BYTES, 0) != (ssize_t)SHMBUS_IDENTITY_BYTES) {
        return false;
    }
    identity_text(text, identity);
    return true;
}

#endif
