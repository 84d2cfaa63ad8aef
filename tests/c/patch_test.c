/* The code of patches against a plain reference: every width, any shape, any share of changes, in
 * place with streams before it and beside its base. */
#define _GNU_SOURCE
#include "pool/patch_code.h"
#include "support.h"

#define LARGEST (96u << 10)
#define ROUNDS 3000

static uint64_t seed = 20240817;

static uint64_t below(uint64_t bound) {
    return next_random(&seed) % bound;
}

static struct patch_shape any_shape(void) {
    static const uint32_t widths[] = {1, 2, 4};
    struct patch_shape shape;
    shape.width = widths[below(3)];
    /* Often near the borders of a block. */
    static const uint64_t lengths[] = {1, 7, 255, 256, 257, 511, 2047, 2048, 2049, 4100};
    shape.row_bytes = (below(2) ? lengths[below(10)] : 1 + below(5000)) * shape.width;
    shape.rows = 1 + below(4);
    shape.stride = shape.row_bytes + (below(2) ? below(9) * shape.width : 0);
    return shape;
}

static uint64_t bytes_of(const struct patch_shape *shape) {
    return (shape->rows - 1) * shape->stride + shape->row_bytes;
}

/* The largest stream for so many changed elements. */
static uint64_t stream_bytes(const struct patch_shape *shape, uint64_t changes) {
    uint64_t elements = shape->row_bytes / shape->width;
    uint64_t spans = (elements + PATCH_SPAN - 1) / PATCH_SPAN;
    return shape->rows * spans + changes * (1 + shape->width);
}

/* Changes elements of consecutive rows; few, many or the whole. */
static uint64_t change(uint8_t *now, const struct patch_shape *shape) {
    uint64_t elements = shape->rows * shape->row_bytes / shape->width;
    static const uint64_t shares[] = {100000, 1000, 100, 10, 2, 1};
    uint64_t share = shares[below(6)], count = 0;
    for (uint64_t i = 0; i < elements; i++) {
        if (below(share) == 0) {
            now[i * shape->width + below(shape->width)] ^= (uint8_t)(1 + below(255));
            count++;
        }
    }
    return count;
}

static void gather(uint8_t *dense, const uint8_t *piece, const struct patch_shape *shape) {
    for (uint64_t row = 0; row < shape->rows; row++) {
        memcpy(dense + row * shape->row_bytes, piece + row * shape->stride, shape->row_bytes);
    }
}

struct memory {
    uint8_t *now, *older, *newer, *reader, *streams[3];
};

static uint8_t *room(void) {
    uint8_t *made = calloc(1, LARGEST);
    CHECK(made != NULL);
    return made;
}

/* Version after version into two slots, like a publisher, with a following reader. */
static void follow(struct memory *memory, const struct patch_shape *shape, int versions) {
    uint64_t bytes = bytes_of(shape), elements = shape->rows * shape->row_bytes / shape->width;
    struct patch_in last = {0};
    uint8_t *before = room();
    CHECK(bytes <= LARGEST);
    for (int version = 0; version < versions; version++) {
        uint8_t *to = version % 2 ? memory->older : memory->newer;
        uint8_t *base = version % 2 ? memory->newer : memory->older;
        uint64_t changes = change(memory->now, shape);
        uint8_t *stream = memory->streams[version % 2];
        struct patch_out out = {.at = stream, .end = stream + LARGEST};
        /* The first goes beside; in place the slot is a version behind. */
        bool in_place = version > 0 && below(4) > 0;
        struct patch_in chain = last;
        memcpy(before, base, LARGEST);
        CHECK(patch_encode(&out, shape, memory->now, in_place ? to : base, to, &chain,
                           in_place ? 1 : 0));
        CHECK(!in_place || chain.at == chain.end);
        CHECK(memcmp(before, base, LARGEST) == 0);
        CHECK(out.changes <= changes && changes - out.changes <= changes / 8 + 1);
        CHECK((uint64_t)(out.at - stream) <= stream_bytes(shape, out.changes) ||
              out.changes * (1 + shape->width) >= elements);
        gather(before, to, shape);
        CHECK(memcmp(before, memory->now, shape->rows * shape->row_bytes) == 0);
        struct patch_in in = {.at = stream, .end = out.at};
        CHECK(patch_apply(&in, shape, memory->reader) && in.at == in.end && !in.damaged);
        CHECK(in.base_digest == out.base_digest);
        CHECK(memcmp(memory->reader, to, bytes) == 0);
        last = (struct patch_in){.at = stream, .end = out.at};
    }
    free(before);
}

static void every_shape_follows_bit_by_bit(void) {
    struct memory memory = {room(), room(), room(), room(), {room(), room(), room()}};
    for (int round = 0; round < ROUNDS / 10; round++) {
        struct patch_shape shape = any_shape();
        if (bytes_of(&shape) > LARGEST / 4) {
            continue;
        }
        memset(memory.now, 0, LARGEST);
        memset(memory.older, 0, LARGEST);
        memset(memory.newer, 0, LARGEST);
        memset(memory.reader, 0, LARGEST);
        follow(&memory, &shape, 5);
    }
    uint8_t *all[] = {memory.now,        memory.older,      memory.newer,     memory.reader,
                      memory.streams[0], memory.streams[1], memory.streams[2]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

static void one_wrong_element_of_the_base_is_noticed(void) {
    uint8_t now[2000] = {0}, base[2000] = {0}, reader[2000], stream[8000];
    const struct patch_shape shape = {.rows = 1, .row_bytes = 2000, .stride = 2000, .width = 2};
    for (size_t i = 0; i < sizeof now; i += 20) {
        now[i] = 1;
    }
    struct patch_out out = {.at = stream, .end = stream + sizeof stream};
    CHECK(patch_encode(&out, &shape, now, base, base, NULL, 0) && out.changes == 100);
    for (int round = 0; round < ROUNDS; round++) {
        memset(reader, 0, sizeof reader);
        size_t at = below(100) * 20 + below(2);
        reader[at] = (uint8_t)(1 + below(255));
        struct patch_in in = {.at = stream, .end = out.at};
        CHECK(patch_apply(&in, &shape, reader) && in.base_digest != out.base_digest);
    }
}

static void a_stream_without_room_ends_before_its_end(void) {
    static uint8_t now[64 << 10], base[64 << 10];
    const struct patch_shape shape = {
        .rows = 1, .row_bytes = sizeof now, .stride = sizeof now, .width = 2};
    memset(now, 1, sizeof now);
    for (uint64_t size = 0; size < 4000; size += 97) {
        uint8_t *stream = malloc(size + 1); /* a sanitizer sees a byte too many */
        CHECK(stream != NULL);
        memset(base, 0, sizeof base);
        struct patch_out out = {.at = stream, .end = stream + size};
        CHECK(!patch_encode(&out, &shape, now, base, base, NULL, 0));
        CHECK(out.at <= stream + size && out.full);
        free(stream);
    }
}

int main(void) {
    every_shape_follows_bit_by_bit();
    one_wrong_element_of_the_base_is_noticed();
    a_stream_without_room_ends_before_its_end();
    printf("patches: ok\n");
    return 0;
}
