/* Numbers of JSON text: digits eight at a time, and doubles by the method of Eisel and Lemire.
 *
 * What json.dumps writes of tokens and logprobs is read on a quick way, which leaves all other numbers
 * as they are. Integers are short: the commas of 64 bytes are found first, so that none waits for the
 * length of the one before it. A double waits for that and for nothing else.
 *
 * Source: D. Lemire, "Number parsing at a gigabyte per second", 2021, and its implementation in
 * fast_float. Invariant: where that method cannot decide a rounding, or a power of ten is beyond the
 * table, the number is not plain. */
#include "gateway/json_text.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "gateway/powers_of_five.h"

/* So many digits fit into 64 bits, whatever they are. */
#define MOST_DIGITS 19

/* A number as written: digits * 10^power. */
struct decimal {
    uint64_t digits;
    int64_t power;
    bool negative;
    bool whole; /* no point, no exponent */
};

static inline bool is_digit(char byte) {
    return (unsigned char)(byte - '0') < 10;
}

static const uint64_t powers_of_ten[9] = {1,      10,      100,      1000,     10000,
                                          100000, 1000000, 10000000, 100000000};

/* Eight bytes, the first one lowest, less '0' each: 0 to 9 where they are digits. */
static inline uint64_t eight_bytes(const char *at) {
    uint64_t bytes;
    memcpy(&bytes, at, sizeof bytes);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    bytes = __builtin_bswap64(bytes);
#endif
    return bytes ^ UINT64_C(0x3030303030303030);
}

/* The highest bit of the first byte that is no digit, and maybe of others behind it. */
static inline uint64_t first_other(uint64_t bytes) {
    return ((bytes + UINT64_C(0x7676767676767676)) | bytes) & UINT64_C(0x8080808080808080);
}

static inline uint64_t value_of_eight(uint64_t digits) {
    digits = digits * 10 + (digits >> 8);
    return ((digits & UINT64_C(0x000000FF000000FF)) * UINT64_C(0x000F424000000064) +
            ((digits >> 16) & UINT64_C(0x000000FF000000FF)) * UINT64_C(0x0000271000000001)) >>
           32;
}

/* Reads digits; returns how many there were. More than MOST_DIGITS leave a wrong value. */
static inline size_t read_digits(struct json_text *text, uint64_t *value) {
    const char *begin = text->at;
    while (text->end - text->at >= 8) {
        uint64_t bytes = eight_bytes(text->at), other = first_other(bytes);
        if (other != 0) {
            unsigned count = (unsigned)__builtin_ctzll(other) / 8;
            if (count > 0) {
                *value = *value * powers_of_ten[count] + value_of_eight(bytes << (64 - 8 * count));
                text->at += count;
            }
            return (size_t)(text->at - begin);
        }
        *value = *value * 100000000 + value_of_eight(bytes);
        text->at += 8;
    }
    while (text->at < text->end && is_digit(*text->at)) {
        *value = *value * 10 + (uint64_t)(*text->at++ - '0');
    }
    return (size_t)(text->at - begin);
}

static inline bool read_exponent(struct json_text *text, int64_t *power) {
    bool negative = json_passes(text, '-');
    if (!negative) {
        json_passes(text, '+');
    }
    uint64_t value = 0;
    size_t digits = read_digits(text, &value);
    if (digits == 0 || digits > 4) {
        return false;
    }
    *power += negative ? -(int64_t)value : (int64_t)value;
    return true;
}

/* Reads a number of at most MOST_DIGITS digits; leading zeros behind the point count none. */
static inline bool read_decimal(struct json_text *text, struct decimal *found) {
    *found = (struct decimal){.negative = json_passes(text, '-'), .whole = true};
    const char *begin = text->at;
    size_t digits = read_digits(text, &found->digits);
    if (digits == 0 || (digits > 1 && *begin == '0')) {
        return false;
    }
    if (json_passes(text, '.')) {
        found->whole = false;
        bool leading = *begin == '0';
        if (leading) {
            digits = 0;
            const char *zeros = text->at;
            while (text->at < text->end && *text->at == '0') {
                text->at++;
            }
            found->power = zeros - text->at;
        }
        size_t more = read_digits(text, &found->digits);
        if (more == 0 && (!leading || found->power == 0)) {
            return false;
        }
        found->power -= (int64_t)more;
        digits += more;
    }
    if (digits > MOST_DIGITS) {
        return false;
    }
    if (text->at < text->end && (*text->at | 0x20) == 'e') {
        text->at++;
        found->whole = false;
        return read_exponent(text, &found->power);
    }
    return true;
}

static inline bool int64_of(const struct decimal *found, int64_t *value) {
    if (!found->whole || found->digits > (uint64_t)INT64_MAX + (found->negative ? 1 : 0)) {
        return false;
    }
    *value = (int64_t)(found->negative ? UINT64_C(0) - found->digits : found->digits);
    return true;
}

/* Bits of a positive double. digits is not 0. */
static inline bool bits_of(uint64_t digits, int64_t power, uint64_t *bits) {
    const uint64_t *five = powers_of_five[power + MOST_POWER_OF_FIVE];
    int zeros = __builtin_clzll(digits);
    digits <<= zeros;
    unsigned __int128 product = (unsigned __int128)digits * five[0];
    uint64_t high = (uint64_t)(product >> 64), low = (uint64_t)product;
    if ((high & 0x1FF) == 0x1FF) {
        uint64_t second = (uint64_t)(((unsigned __int128)digits * five[1]) >> 64);
        low += second;
        high += low < second;
        if (low == UINT64_MAX && (power < -27 || power > 55)) {
            return false;
        }
    }
    int upper = (int)(high >> 63);
    uint64_t mantissa = high >> (upper + 9);
    int64_t exponent = ((217706 * power) >> 16) + 63 + upper - zeros + 1023;
    /* Just between two doubles: to the even one. */
    if (low <= 1 && power >= -4 && power <= 23 && (mantissa & 3) == 1 &&
        mantissa << (upper + 9) == high) {
        mantissa &= ~UINT64_C(1);
    }
    mantissa += mantissa & 1;
    mantissa >>= 1;
    if (mantissa >= UINT64_C(1) << 53) {
        mantissa = UINT64_C(1) << 52;
        exponent++;
    }
    *bits = (mantissa & ~(UINT64_C(1) << 52)) | (uint64_t)exponent << 52;
    return true;
}

static inline bool double_of(const struct decimal *found, double *value) {
    uint64_t bits = 0;
    if (found->digits != 0) {
        if (found->power < -MOST_POWER_OF_FIVE || found->power > MOST_POWER_OF_FIVE ||
            !bits_of(found->digits, found->power, &bits)) {
            return false;
        }
        bits |= (uint64_t)found->negative << 63;
    } else if (found->negative && !found->whole) {
        bits = UINT64_C(1) << 63; /* -0.0; an integer has no such */
    }
    memcpy(value, &bits, sizeof bits);
    return true;
}

/* Bytes whose commas one byte can count: a compiler makes vectors of them. */
#define COUNTED_BLOCK 192

size_t json_list_length(struct json_text text) {
    json_skip_space(&text);
    if (text.at == text.end || *text.at == ']') {
        return 0;
    }
    const char *end = memchr(text.at, ']', (size_t)(text.end - text.at));
    const char *at = text.at;
    size_t length = 1;
    for (; end != NULL && end - at >= COUNTED_BLOCK; at += COUNTED_BLOCK) {
        uint8_t commas = 0;
        for (size_t i = 0; i < COUNTED_BLOCK; i++) {
            commas = (uint8_t)(commas + (at[i] == ','));
        }
        length += commas;
    }
    for (; end != NULL && at < end; at++) {
        length += *at == ',';
    }
    return length;
}

/* Bytes that the quick way may look at: a sign, a digit, a point, 24 digits, and what follows. */
#define QUICK_BYTES 32
/* Bytes whose commas are found at once. */
#define BLOCK_BYTES 64

/* Passes a byte that is there by habit, or is not. The barrier keeps it a branch, which a processor
 * guesses; as arithmetic it would have all that follows wait for the byte. */
#define PASS_HABITUAL(at)                                                                      \
    do {                                                                                       \
        (at)++;                                                                                \
        __asm__("" : "+r"(at));                                                                \
    } while (0)

/* Passes ',' and a space behind it. */
static inline bool pass_comma(const char **at) {
    if (**at != ',') {
        return false;
    }
    ++*at;
    if (**at == ' ') {
        PASS_HABITUAL(*at);
    }
    return true;
}

/* How many of eight bytes are digits, from the first one on. */
static inline unsigned leading_digits(uint64_t bytes) {
    uint64_t other = first_other(bytes);
    return other == 0 ? 8 : (unsigned)__builtin_ctzll(other) / 8;
}

/* `value` with the first `count` of eight bytes behind it. */
static inline uint64_t with_digits(uint64_t value, uint64_t bytes, unsigned count) {
    unsigned half = 4 * (8 - count); /* all 64 bits are shifted in two */
    return value * powers_of_ten[count] + value_of_eight(bytes << half << half);
}

/* A bit for each of 64 bytes that is a comma, the first byte lowest. Beside SSE2 only the fuzzer
 * calls it, to compare. */
__attribute__((unused)) static inline uint64_t commas_plain(const char *at) {
    uint64_t commas = 0;
    for (unsigned i = 0; i < BLOCK_BYTES; i += 8) {
        uint64_t other = eight_bytes(at + i) ^ UINT64_C(0x1C1C1C1C1C1C1C1C); /* ',' less '0' */
        uint64_t low = (other & UINT64_C(0x7F7F7F7F7F7F7F7F)) + UINT64_C(0x7F7F7F7F7F7F7F7F);
        uint64_t found = ~(low | other) & UINT64_C(0x8080808080808080);
        commas |= ((found >> 7) * UINT64_C(0x0102040810204080)) >> 56 << i;
    }
    return commas;
}

static inline uint64_t commas_of(const char *at) {
#ifdef __SSE2__
    uint64_t commas = 0;
    for (unsigned i = 0; i < BLOCK_BYTES; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)(at + i));
        __m128i found = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(','));
        commas |= (uint64_t)(unsigned)_mm_movemask_epi8(found) << i;
    }
    return commas;
#else
    return commas_plain(at);
#endif
}

/* The integer between begin and end, of up to eight digits; eight bytes can be read. */
static inline bool quick_int64(const char *begin, const char *end, int64_t *value) {
    bool negative = *begin == '-';
    if (negative) {
        PASS_HABITUAL(begin);
    }
    size_t count = (size_t)(end - begin);
    if (count - 1 > 7) {
        return false;
    }
    uint64_t bytes = eight_bytes(begin) << (64 - 8 * count);
    if (first_other(bytes) != 0 || (count > 1 && *begin == '0')) {
        return false;
    }
    int64_t found = (int64_t)value_of_eight(bytes);
    *value = negative ? -found : found;
    return true;
}

/* Reads up to `most` integers, each with the comma behind it; how many. The text is behind them. */
static inline size_t quick_int64s(struct json_text *text, int64_t *out, size_t most) {
    const char *begin = text->at;
    size_t count = 0;
    for (const char *block = begin; text->end - block >= BLOCK_BYTES + QUICK_BYTES && count < most;
         block += BLOCK_BYTES) {
        for (uint64_t commas = commas_of(block); commas != 0; commas &= commas - 1) {
            const char *end = block + __builtin_ctzll(commas);
            if (count == most || !quick_int64(begin, end, &out[count])) {
                text->at = begin;
                return count;
            }
            count++;
            begin = end + 1;
            if (*begin == ' ') {
                PASS_HABITUAL(begin);
            }
        }
    }
    text->at = begin;
    return count;
}

/* Reads a digit, a point, more digits, and the comma behind them; false changes nothing. */
static inline bool quick_double(const char **at, double *value) {
    const char *begin = *at;
    bool negative = *begin == '-';
    if (negative) {
        PASS_HABITUAL(begin);
    }
    uint64_t digits = (uint64_t)(unsigned char)(begin[0] - '0');
    if (digits > 9 || begin[1] != '.') {
        return false;
    }
    bool leads = digits == 0; /* a zero, which is no digit of the value */
    begin += 2;
    uint64_t bytes = eight_bytes(begin);
    unsigned count = leading_digits(bytes), behind_point = count;
    if (count < 8) {
        if (count == 0) {
            return false;
        }
        digits = with_digits(digits, bytes, count);
    } else {
        digits = digits * 100000000 + value_of_eight(bytes);
        bytes = eight_bytes(begin + 8);
        count = leading_digits(bytes);
        digits = with_digits(digits, bytes, count);
        behind_point += count;
        if (count == 8) {
            bytes = eight_bytes(begin + 16);
            count = leading_digits(bytes);
            digits = with_digits(digits, bytes, count);
            behind_point += count;
            if (behind_point > (leads ? MOST_DIGITS : MOST_DIGITS - 1)) {
                return false;
            }
        }
    }
    begin += behind_point;
    uint64_t bits = 0;
    if (!pass_comma(&begin) || (digits != 0 && !bits_of(digits, -(int64_t)behind_point, &bits))) {
        return false;
    }
    bits |= (uint64_t)negative << 63;
    memcpy(value, &bits, sizeof bits);
    *at = begin;
    return true;
}

/* The same for doubles. */
static inline size_t quick_doubles(struct json_text *text, double *out, size_t most) {
    size_t count = 0;
    while (count < most && text->end - text->at >= QUICK_BYTES &&
           quick_double(&text->at, &out[count])) {
        count++;
    }
    return count;
}

/* What stands behind number `i` of `length`: a comma, or the bracket behind the last. */
static inline bool read_separator(struct json_text *text, size_t i, size_t length) {
    json_skip_space(text);
    if (!json_passes(text, i + 1 < length ? ',' : ']')) {
        return false;
    }
    if (i + 1 < length) {
        json_skip_space(text); /* the quick way begins at a number */
    }
    return true;
}

#define LIST_READER(name, type, quick, convert)                                                \
    bool name(struct json_text *text, type *out, size_t length, size_t *bad) {                 \
        json_skip_space(text);                                                                 \
        for (*bad = 0; *bad < length; ++*bad) {                                                \
            struct decimal found;                                                              \
            *bad += quick(text, out + *bad, length - *bad - 1);                                \
            json_skip_space(text);                                                             \
            if (!read_decimal(text, &found) || !convert(&found, &out[*bad]) ||                 \
                !read_separator(text, *bad, length)) {                                         \
                return false;                                                                  \
            }                                                                                  \
        }                                                                                      \
        return length > 0 || json_passes(text, ']');                                           \
    }
LIST_READER(json_read_int64s, int64_t, quick_int64s, int64_of)
LIST_READER(json_read_doubles, double, quick_doubles, double_of)

/* ---- The members of an object. Invariant: brackets within strings count none. */

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
