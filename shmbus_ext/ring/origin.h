/* What a record is known by among all buses, as bytes that go between processes and nodes.
 *
 * Invariant: origins of one bus sort as (producer, sequence), so their numbers have their high bytes
 * first. */
#ifndef SHMBUS_RING_ORIGIN_H
#define SHMBUS_RING_ORIGIN_H

#include <stdint.h>
#include <string.h>

#include "layout.h"

/* Offset  Size  Field
 *      0    16  identity     of the bus
 *     16     8  producer_id  the highest byte first
 *     24     8  sequence     the same */
#define RELAY_ORIGIN_BYTES (SHMBUS_IDENTITY_BYTES + 16u)

static inline void origin_pack_number(uint8_t *to, uint64_t number) {
    for (int i = 0; i < 8; i++) {
        to[i] = (uint8_t)(number >> (56 - 8 * i));
    }
}

static inline uint64_t origin_unpack_number(const uint8_t *from) {
    uint64_t number = 0;
    for (int i = 0; i < 8; i++) {
        number = number << 8 | from[i];
    }
    return number;
}

static inline void origin_pack(void *into, const uint8_t identity[SHMBUS_IDENTITY_BYTES],
                               uint64_t producer_id, uint64_t sequence) {
    uint8_t *to = into;
    memcpy(to, identity, SHMBUS_IDENTITY_BYTES);
    origin_pack_number(to + SHMBUS_IDENTITY_BYTES, producer_id);
    origin_pack_number(to + SHMBUS_IDENTITY_BYTES + 8, sequence);
}

#endif
