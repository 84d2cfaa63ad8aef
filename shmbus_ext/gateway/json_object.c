/* The members of a JSON object. Invariant: brackets within strings count none. */
#include "gateway/json_object.h"

#include <string.h>

/* Passes the rest of a string, whose opening quote was passed. */
static bool pass_string(struct json_text *text) {
    const char *begin = text->at;
    for (;;) {
        const char *quote = memchr(text->at, '"', (size_t)(text->end - text->at));
        if (quote == NULL) {
            return false;
        }
        const char *slash = quote;
        while (slash > begin && slash[-1] == '\\') {
            slash--;
        }
        text->at = quote + 1;
        if ((quote - slash) % 2 == 0) {
            return true;
        }
    }
}

bool json_pass_key(struct json_text *text, const char **key, size_t *key_bytes) {
    json_skip_space(text);
    if (!json_passes(text, '"')) {
        return false;
    }
    *key = text->at;
    if (!pass_string(text)) {
        return false;
    }
    *key_bytes = (size_t)(text->at - *key) - 1;
    json_skip_space(text);
    if (memchr(*key, '\\', *key_bytes) != NULL || !json_passes(text, ':')) {
        return false;
    }
    json_skip_space(text);
    return true;
}

bool json_pass_value(struct json_text *text) {
    size_t depth = 0;
    while (text->at < text->end) {
        switch (*text->at) {
        case '"':
            text->at++;
            if (!pass_string(text)) {
                return false;
            }
            if (depth == 0) {
                return true;
            }
            continue;
        case '[':
        case '{':
            depth++;
            break;
        case ']':
        case '}':
            if (depth == 0) {
                return true; /* of what is around it */
            }
            if (--depth == 0) {
                text->at++;
                return true;
            }
            break;
        case ',':
            if (depth == 0) {
                return true;
            }
            break;
        default:
            break;
        }
        text->at++;
    }
    return depth == 0;
}
