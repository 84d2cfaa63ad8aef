/* Reads replies that grant groups (see plain_reply.h). */
#include "python/read/plain_reply.h"

#include <string.h>

/* Behind a text, or NULL where the bytes begin otherwise, as for a NULL. */
static const uint8_t *skip_text(const uint8_t *at, const uint8_t *end, const char *text,
                                size_t size) {
    return at != NULL && (size_t)(end - at) >= size && memcmp(at, text, size) == 0 ? at + size
                                                                                   : NULL;
}

#define SKIP(at, end, text) skip_text(at, end, text, sizeof text - 1)

static const uint8_t *read_big_endian(const uint8_t *at, const uint8_t *end, size_t bytes,
                                      uint64_t *number) {
    if ((size_t)(end - at) < bytes) {
        return NULL;
    }
    *number = 0;
    for (size_t i = 0; i < bytes; i++) {
        *number = *number << 8 | at[i];
    }
    return at + bytes;
}

const uint8_t *py_plain_reply_number(const uint8_t *at, const uint8_t *end, uint64_t *number) {
    if (at == NULL || at == end) {
        return NULL;
    }
    uint8_t kind = *at++;
    *number = kind;
    if (kind < 0x80) {
        return at;
    }
    return kind >= 0xcc && kind <= 0xcf ? read_big_endian(at, end, (size_t)1 << (kind - 0xcc), number)
                                        : NULL;
}

static const uint8_t *read_array_head(const uint8_t *at, const uint8_t *end, uint64_t *count) {
    if (at == NULL || at == end) {
        return NULL;
    }
    uint8_t kind = *at++;
    *count = kind & 0xfu;
    if (kind >> 4 == 0x9) {
        return at;
    }
    return kind == 0xdc || kind == 0xdd ? read_big_endian(at, end, kind == 0xdc ? 2 : 4, count)
                                        : NULL;
}

static const uint8_t *read_bytes(const uint8_t *at, const uint8_t *end, const uint8_t **bytes,
                                 size_t *size) {
    if (at == NULL || at == end || *at < 0xc4 || *at > 0xc6) {
        return NULL;
    }
    uint64_t count;
    size_t head = (size_t)1 << (*at - 0xc4);
    at = read_big_endian(at + 1, end, head, &count);
    if (at == NULL || count > (size_t)(end - at)) {
        return NULL;
    }
    *bytes = at;
    *size = (size_t)count;
    return at + count;
}

const uint8_t *py_plain_reply_grant(const uint8_t *at, const uint8_t *end,
                                 struct plain_grant *grant) {
    at = py_plain_reply_number(SKIP(at, end, REPLY_GRANTED), end, &grant->number);
    at = py_plain_reply_number(SKIP(at, end, REPLY_SIZE), end, &grant->size);
    return read_bytes(SKIP(at, end, REPLY_PLACES), end, &grant->places, &grant->places_bytes);
}

/* The body of the frame that begins here, and its end; NULL where it is not whole. */
static const uint8_t *frame_body(const uint8_t *at, const uint8_t *end, const uint8_t **body_end) {
    if ((size_t)(end - at) < FRAME_HEAD_BYTES) {
        return NULL;
    }
    uint64_t size = 0;
    for (unsigned i = 0; i < FRAME_HEAD_BYTES; i++) {
        size |= (uint64_t)at[i] << (8 * i);
    }
    at += FRAME_HEAD_BYTES;
    if (size > (size_t)(end - at)) {
        return NULL;
    }
    *body_end = at + size;
    return at;
}

/* Whether the frame is a message of confirmations, and nothing else. */
static bool read_ended(const uint8_t *body, const uint8_t *end, struct plain_reply *reply) {
    const uint8_t *at = read_array_head(SKIP(body, end, REPLY_ENDED), end, &reply->ended_count);
    reply->ended = at;
    uint64_t number;
    for (uint64_t i = 0; at != NULL && i < reply->ended_count; i++) {
        at = py_plain_reply_number(at, end, &number);
    }
    return at == end;
}

static bool read_leases(const uint8_t *body, const uint8_t *end, uint64_t id,
                        struct plain_reply *reply) {
    uint64_t found;
    const uint8_t *at = py_plain_reply_number(SKIP(body, end, REPLY_LEASES), end, &found);
    if (at == NULL || found != id) {
        return false;
    }
    at = read_array_head(SKIP(at, end, REPLY_GROUPS), end, &reply->granted_count);
    reply->granted = at;
    struct plain_grant grant;
    for (uint64_t i = 0; at != NULL && i < reply->granted_count; i++) {
        at = py_plain_reply_grant(at, end, &grant);
    }
    return at == end && reply->granted_count > 0;
}

bool py_plain_reply_find(const uint8_t *bytes, size_t size, uint64_t id, struct plain_reply *reply) {
    const uint8_t *end = bytes + size, *body = frame_body(bytes, end, &reply->end);
    reply->ended = NULL;
    reply->ended_count = 0;
    if (body != NULL && read_ended(body, reply->end, reply)) {
        body = frame_body(reply->end, end, &reply->end);
    } else {
        reply->ended_count = 0;
    }
    return body != NULL && read_leases(body, reply->end, id, reply);
}
