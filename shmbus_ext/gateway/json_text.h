/* Numbers of JSON text as int64 and double, at exactly their value, without an object for each.
 *
 * What is read is the plain case: text that json.dumps writes of lists of finite numbers. Anything
 * else is NOT_PLAIN, never wrong; whoever asked then reads it another way, which says what is wrong.
 *
 * Invariants: no byte outside of the text is read, no number outside of the room written. A double
 * is the one nearest to the text, ties to even, as float() has it. */
#ifndef SHMBUS_GATEWAY_JSON_TEXT_H
#define SHMBUS_GATEWAY_JSON_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Text that is being read. */
struct json_text {
    const char *at;
    const char *end;
};

static inline void json_skip_space(struct json_text *text) {
    while (text->at < text->end &&
           (*text->at == ' ' || *text->at == '\n' || *text->at == '\r' || *text->at == '\t')) {
        text->at++;
    }
}

/* Whether the next byte is this one; then it is passed. */
static inline bool json_passes(struct json_text *text, char byte) {
    if (text->at < text->end && *text->at == byte) {
        text->at++;
        return true;
    }
    return false;
}

/* How many numbers a flat list has, if it is one, whose opening bracket was passed. */
size_t json_list_length(struct json_text text);

/* Read the numbers of a flat list, whose opening bracket was passed, and the bracket that ends it.
 * False at the first that is not plain, whose index is then in `bad`. */
bool json_read_int64s(struct json_text *text, int64_t *out, size_t length, size_t *bad);
bool json_read_doubles(struct json_text *text, double *out, size_t length, size_t *bad);

/* ---- The members of an object, one after the other: where each key and each value lies. Values are
 * passed by their brackets and quotes, and not checked: whoever uses the text has it checked by a
 * parser. */
/* Passes a key and its colon, up to its value. False where none is there, or one with an escape. */
bool json_pass_key(struct json_text *text, const char **key, size_t *key_bytes);
/* Passes a value of any kind; false where it does not end. */
bool json_pass_value(struct json_text *text);

#endif
