/* The members of a JSON object, one after the other: where each key and each value lies.
 *
 * Values are passed by their brackets and quotes, and not checked: whoever uses the text has it
 * checked by a parser. Invariant: no byte outside of the text is read. */
#ifndef SHMBUS_GATEWAY_JSON_OBJECT_H
#define SHMBUS_GATEWAY_JSON_OBJECT_H

#include "gateway/json_numbers.h"

/* Passes a key and its colon, up to its value. False where none is there, or one with an escape. */
bool json_pass_key(struct json_text *text, const char **key, size_t *key_bytes);
/* Passes a value of any kind; false where it does not end. */
bool json_pass_value(struct json_text *text);

#endif
