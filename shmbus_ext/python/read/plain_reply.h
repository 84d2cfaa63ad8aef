/* A daemon's reply that grants groups, in the one form that C reads: what `messages.frame` makes of
 * it for a client without ranks, as MessagePack in length-prefixed frames.
 *
 * Invariants:
 * - Nothing is used that does not lie within the bytes that came.
 * - What is found is what the decoder of shmbus/control/messages.py would find. Whatever is encoded
 *   in another way, is not whole, or is another message, is not found: it is left to that decoder. */
#ifndef SHMBUS_PYTHON_PLAIN_REPLY_H
#define SHMBUS_PYTHON_PLAIN_REPLY_H

#include "python/binding.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Before each message: how many bytes it has, little-endian. */
#define FRAME_HEAD_BYTES 4u

/* MessagePack, by the names of shmbus/control/messages.py; what stands between them is a number, or
 * bytes. */
#define REPLY_LEASES "\x83\xa4type\xa6Leases\xa2id"
#define REPLY_GROUPS "\xa6groups"
#define REPLY_GRANTED "\x84\xa4type\xa7Granted\xa6number"
#define REPLY_SIZE "\xa4size"
#define REPLY_PLACES "\xa6places"
#define REPLY_ENDED "\x82\xa4type\xa5" "Ended\xa7numbers"

struct plain_grant {
    uint64_t number, size;
    const uint8_t *places;
    size_t places_bytes;
};

struct plain_reply {
    const uint8_t *ended; /* the first of the numbers that a message before it confirms */
    uint64_t ended_count;
    const uint8_t *granted; /* the first group */
    uint64_t granted_count;
    const uint8_t *end; /* of its last frame */
};

/* Whether the bytes begin with the whole reply to this request, which grants a group at least; a
 * message with confirmations may be before it. */
bool py_plain_reply_find(const uint8_t *bytes, size_t size, uint64_t id, struct plain_reply *reply);

/* The next of the numbers, and the next group: behind it, or NULL where there is none. */
const uint8_t *py_plain_reply_number(const uint8_t *at, const uint8_t *end, uint64_t *number);
const uint8_t *py_plain_reply_grant(const uint8_t *at, const uint8_t *end, struct plain_grant *grant);

#endif
