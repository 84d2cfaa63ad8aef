/* A stream of a patch of any bytes: applied or refused, and only the piece is written.
 *
 * Input: width, rows, row length (two bytes), gap between rows; then the stream, applied alone, and
 * as a slot's catching up beside the making of a second stream: both have to agree. */
#include "fuzz.h"

#include "pool/patch_code.h"

#define HEAD 5u
#define EDGE 64u
#define MARK 0xA5

static uint8_t *bordered(uint64_t bytes) {
    uint8_t *made = malloc(bytes + 2 * EDGE);
    CHECK(made != NULL);
    memset(made, MARK, bytes + 2 * EDGE);
    memset(made + EDGE, 0, bytes);
    return made;
}

static void check_border(const uint8_t *made, uint64_t bytes) {
    for (uint64_t i = 0; i < EDGE; i++) {
        CHECK(made[i] == MARK && made[EDGE + bytes + i] == MARK);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint32_t widths[] = {1, 2, 4};
    if (size < HEAD) {
        return 0;
    }
    struct patch_shape shape = {.width = widths[data[0] % 3], .rows = 1u + data[1] % 4u};
    shape.row_bytes = (1u + (data[2] | (uint64_t)data[3] << 8) % 5000) * shape.width;
    shape.stride = shape.row_bytes + data[4] % 8u * shape.width;
    uint64_t bytes = shape.rows * shape.stride;
    uint64_t room = 6 * bytes + 2 * PATCH_SPAN * 5;
    const uint8_t *stream = data + HEAD, *end = data + size;
    uint8_t *one = bordered(bytes), *other = bordered(bytes), *packed = malloc(room);
    uint8_t *now = calloc(1, shape.rows * shape.row_bytes);
    CHECK(packed != NULL && now != NULL);
    struct patch_in in = {.at = stream, .end = end};
    bool good = patch_apply(&in, &shape, one + EDGE);
    CHECK(good != in.damaged && in.at <= end);
    struct patch_in chain = {.at = stream, .end = end};
    struct patch_out out = {.at = packed, .end = packed + room};
    bool made = patch_encode(&out, &shape, now, other + EDGE, other + EDGE, &chain, 1);
    CHECK(made == good && chain.at <= end && out.at <= out.end);
    CHECK(!good || (chain.base_digest == in.base_digest && chain.at == in.at));
    if (good) {
        /* The fresh stream leads from the one to zeros, like its twin. */
        struct patch_in back = {.at = packed, .end = out.at};
        CHECK(patch_apply(&back, &shape, one + EDGE) && back.base_digest == out.base_digest);
        CHECK(memcmp(one, other, bytes + 2 * EDGE) == 0);
    }
    check_border(one, bytes);
    check_border(other, bytes);
    free(one);
    free(other);
    free(packed);
    free(now);
    return 0;
}
