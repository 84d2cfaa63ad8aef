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
