/* Any bytes as a JSON object: passed within their bounds, and each list of numbers that is taken for
 * plain has the values that strtod and strtoll give.
 *
 * Input: the text. */
#include "fuzz.h"

#include "gateway/json_text.c"

#include <errno.h>

#define MOST_NUMBERS 4096

static int64_t int64s[MOST_NUMBERS];
static double doubles[MOST_NUMBERS];

/* The next number of a list as the C library reads it; `at` behind it and its comma. */
static bool is_double(char **at, double value) {
    double other = strtod(*at, at);
    *at += strspn(*at, " \t\r\n,");
    /* An integer has no negative zero. */
    return memcmp(&other, &value, sizeof value) == 0 || (other == 0 && value == 0);
}

static bool is_int64(char **at, int64_t value) {
    errno = 0;
    long long other = strtoll(*at, at, 10);
    *at += strspn(*at, " \t\r\n,");
    return errno == 0 && other == value;
}

static void read_list(struct json_text text) {
    size_t length = json_list_length(text), bad;
    if (length > MOST_NUMBERS) {
        return;
    }
    struct json_text as_floats = text, as_integers = text;
    bool floats = json_read_doubles(&as_floats, doubles, length, &bad);
    CHECK(floats || bad < length || length == 0);
    bool integers = json_read_int64s(&as_integers, int64s, length, &bad);
    CHECK(floats || !integers);
    CHECK(as_floats.at <= text.end && as_integers.at <= text.end);
    if (!floats) {
        return;
    }
    CHECK(as_floats.at[-1] == ']');
    size_t bytes = (size_t)(as_floats.at - text.at);
    char *copy = malloc(bytes + 1);
    CHECK(copy != NULL);
    memcpy(copy, text.at, bytes);
    copy[bytes] = 0;
    char *at = copy, *again = copy;
    for (size_t i = 0; i < length; i++) {
        CHECK(is_double(&at, doubles[i]));
        CHECK(!integers || is_int64(&again, int64s[i]));
    }
    CHECK(*at == ']' || length == 0);
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *begin = (const char *)data;
    struct json_text text = {begin, begin + size};
    const char *key;
    size_t key_bytes;
    for (const char *at = begin; at < text.end; at++) {
        CHECK(text.end - at < BLOCK_BYTES || commas_of(at) == commas_plain(at));
        if (*at == '[') {
            read_list((struct json_text){at + 1, text.end});
        }
    }
    json_skip_space(&text);
    if (!json_passes(&text, '{')) {
        return 0;
    }
    while (json_pass_key(&text, &key, &key_bytes) && json_pass_value(&text)) {
        CHECK(key >= begin && key + key_bytes < text.at && text.at <= text.end);
        json_skip_space(&text);
        if (!json_passes(&text, ',')) {
            break;
        }
    }
    CHECK(text.at <= text.end);
    return 0;
}
