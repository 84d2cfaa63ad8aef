/* Finding, packing and applying changes (see patch_code.h).
 *
 * Everything that runs an element or a span is inlined with the element's width as a constant, once
 * for each instruction set that compares: what is left in the loops is loads and comparisons. */
#include "pool/patch_code.h"

#include <string.h>

#include "ring/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_AVX2 1
#endif

#define INLINE static inline __attribute__((always_inline))

/* Spans that are copied at once where all of a piece is written: enough for non-temporal stores,
 * and still in the cache that comparing has filled. */
#define BLOCK_SPANS 8u
/* How far ahead of comparing memory is asked for: what passes while it answers. */
#define AHEAD_BYTES 1024u
#define LINE_BYTES 64u
/* Changes whose memory is asked for before the first of them is made: as many as a core can wait
 * for at a time. */
#define BATCH 128u

/* What was there before, in a number that does not depend on the order: one wrong element always
 * changes it, since an odd factor can be undone. */
INLINE uint64_t mixed(uint32_t value, uint64_t at) {
    return (value + UINT64_C(0x9E3779B97F4A7C15)) * (2 * at + 1);
}

INLINE uint32_t load(const uint8_t *data, uint32_t at, const uint32_t width) {
    uint32_t value = 0;
    memcpy(&value, data + (uint64_t)at * width, width);
    return value;
}

INLINE void store(uint8_t *data, uint32_t at, uint32_t value, const uint32_t width) {
    memcpy(data + (uint64_t)at * width, &value, width);
}

/* Which of 64 elements differ, a bit each. */
typedef uint64_t (*differ)(const uint8_t *one, const uint8_t *other, uint32_t width);

#if defined(__SSE2__)
INLINE __m128i at128(const uint8_t *data, uint32_t index) {
    return _mm_loadu_si128((const __m128i *)(const void *)data + index);
}

/* A bit for each of 16 elements that are equal. */
INLINE uint64_t equal16(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    __m128i equal[4];
    for (uint32_t i = 0; i < width; i++) {
        __m128i a = at128(one, i), b = at128(other, i);
        equal[i] = width == 1   ? _mm_cmpeq_epi8(a, b)
                   : width == 2 ? _mm_cmpeq_epi16(a, b)
                                : _mm_cmpeq_epi32(a, b);
    }
    if (width == 1) {
        return (uint32_t)_mm_movemask_epi8(equal[0]);
    }
    if (width == 2) {
        return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(equal[0], equal[1]));
    }
    return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(equal[0], equal[1]),
                                                       _mm_packs_epi32(equal[2], equal[3])));
}

INLINE uint64_t differ_sse2(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    uint64_t equal = 0;
    for (uint32_t i = 0; i < 4; i++) {
        equal |= equal16(one + i * 16 * width, other + i * 16 * width, width) << 16 * i;
    }
    return ~equal;
}
#define DIFFER differ_sse2
#else
INLINE uint64_t differ_plain(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    uint64_t bits = 0;
    if (memcmp(one, other, (size_t)64 * width) == 0) {
        return 0;
    }
    for (uint32_t i = 0; i < 64; i++) {
        bits |= (uint64_t)(load(one, i, width) != load(other, i, width)) << i;
    }
    return bits;
}
#define DIFFER differ_plain
#endif

#ifdef HAVE_AVX2
#define AVX2 __attribute__((target("avx2")))

INLINE AVX2 __m256i at256(const uint8_t *data, uint32_t index) {
    return _mm256_loadu_si256((const __m256i *)(const void *)data + index);
}

/* A bit for each of 32 elements that are equal; packing goes by halves, and is put right after. */
INLINE AVX2 uint64_t equal32(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    __m256i equal[4];
    for (uint32_t i = 0; i < width; i++) {
        __m256i a = at256(one, i), b = at256(other, i);
        equal[i] = width == 1   ? _mm256_cmpeq_epi8(a, b)
                   : width == 2 ? _mm256_cmpeq_epi16(a, b)
                                : _mm256_cmpeq_epi32(a, b);
    }
    __m256i all = equal[0];
    if (width == 2) {
        all = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal[0], equal[1]), 0xD8);
    } else if (width == 4) {
        __m256i low = _mm256_packs_epi32(equal[0], equal[1]);
        __m256i high = _mm256_packs_epi32(equal[2], equal[3]);
        all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                          _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
    return (uint32_t)_mm256_movemask_epi8(all);
}

INLINE AVX2 uint64_t differ_avx2(const uint8_t *one, const uint8_t *other, const uint32_t width) {
    return ~(equal32(one, other, width) |
             equal32(one + 32 * width, other + 32 * width, width) << 32);
}
#endif

/* The largest count for which places are smaller than the values of all. */
INLINE uint32_t most_places(const uint32_t width) {
    return PATCH_SPAN * width / (1 + width);
}

/* Applies one part of a stream to `elements` elements. */
INLINE bool apply_span(struct patch_in *in, uint8_t *to, uint32_t elements, uint64_t first,
                       const uint32_t width) {
    if (in->at == in->end) {
        return false;
    }
    uint32_t count = *in->at++;
    uint64_t left = (uint64_t)(in->end - in->at), digest = 0;
    if (count == PATCH_ALL) {
        if (left < (uint64_t)elements * width) {
            return false;
        }
        for (uint32_t i = 0; i < elements; i++) {
            digest += mixed(load(to, i, width), first + i);
        }
        memcpy(to, in->at, (size_t)elements * width);
        in->at += elements * width;
    } else {
        if (left < (uint64_t)count * (1 + width)) {
            return false;
        }
        for (uint32_t n = 0; n < count; n++, in->at += 1 + width) {
            uint32_t place = in->at[0];
            if (place >= elements) {
                return false;
            }
            digest += mixed(load(to, place, width), first + place);
            store(to, place, load(in->at + 1, 0, width), width);
        }
    }
    in->base_digest += digest;
    return true;
}

/* A span of which so many changed that all of it is packed: what did not change counts too. */
INLINE void pack_all(struct patch_out *out, uint8_t *start, const uint8_t *now,
                     const uint64_t *bits, uint32_t elements, uint64_t first,
                     const uint32_t width) {
    for (uint32_t i = 0; i < elements; i++) {
        if ((bits[i / 64] >> i % 64 & 1) == 0) {
            out->base_digest += mixed(load(now, i, width), first + i);
        }
    }
    start[0] = PATCH_ALL;
    memcpy(start + 1, now, (size_t)elements * width);
    out->at = start + 1 + elements * width;
}

/* Packs what differs in one span, for which there is room; what differs is stored where base is. */
INLINE void pack_span(struct patch_out *out, const uint8_t *now, uint8_t *base, bool in_place,
                      uint32_t elements, uint64_t first, const uint32_t width, differ differs) {
    uint64_t bits[PATCH_SPAN / 64] = {0}, digest = 0;
    if (elements == PATCH_SPAN) {
        for (uint32_t i = 0; i < PATCH_SPAN / 64; i++) {
            bits[i] = differs(now + i * 64 * width, base + i * 64 * width, width);
        }
    } else {
        for (uint32_t i = 0; i < elements; i++) {
            bits[i / 64] |= (uint64_t)(load(now, i, width) != load(base, i, width)) << i % 64;
        }
    }
    uint8_t *start = out->at, *at = start + 1;
    uint32_t count = 0;
    for (uint32_t i = 0; i < PATCH_SPAN / 64; i++) {
        for (uint64_t left = bits[i]; left != 0; left &= left - 1) {
            uint32_t place = i * 64 + (uint32_t)__builtin_ctzll(left);
            uint32_t value = load(now, place, width);
            digest += mixed(load(base, place, width), first + place);
            if (in_place) {
                store(base, place, value, width);
            }
            at[0] = (uint8_t)place;
            store(at + 1, 0, value, width);
            at += 1 + width;
            count++;
        }
    }
    start[0] = (uint8_t)count;
    out->at = at;
    out->base_digest += digest;
    out->changes += count;
    if (count > most_places(width)) {
        pack_all(out, start, now, bits, elements, first, width);
    }
}

/* The hardware looks ahead within a page only, and a page is compared faster than memory answers. */
INLINE void ask_for(const uint8_t *one, const uint8_t *other, uint32_t bytes) {
    for (uint32_t at = 0; at < bytes; at += LINE_BYTES) {
        __builtin_prefetch(one + AHEAD_BYTES + at);
        __builtin_prefetch(other + AHEAD_BYTES + at);
    }
}

/* One block of a row: catch up, compare, write. */
INLINE bool encode_block(struct patch_out *out, const uint8_t *now, uint8_t *base, uint8_t *to,
                         uint32_t elements, uint64_t first, struct patch_in *chain,
                         uint32_t links, const uint32_t width, differ differs) {
    bool in_place = base == to;
    for (uint32_t done = 0; done < elements; done += PATCH_SPAN) {
        uint32_t span = elements - done < PATCH_SPAN ? elements - done : PATCH_SPAN;
        uint64_t at = (uint64_t)done * width;
        if (patch_is_full(out, width)) {
            return false;
        }
        for (uint32_t i = 0; i < links; i++) {
            if (!apply_span(&chain[i], to + at, span, first + done, width)) {
                chain[i].damaged = true;
                return false;
            }
        }
        ask_for(now + at, base + at, span * width);
        pack_span(out, now + at, base + at, in_place, span, first + done, width, differs);
    }
    if (!in_place) {
        copy_non_temporal(to, now, (size_t)elements * width);
    }
    return true;
}

INLINE bool encode_rows(struct patch_out *out, const struct patch_shape *shape,
                        const uint8_t *now, uint8_t *base, uint8_t *to, struct patch_in *chain,
                        uint32_t links, const uint32_t width, differ differs) {
    uint64_t elements = shape->row_bytes / width;
    for (uint64_t row = 0; row < shape->rows; row++) {
        for (uint64_t done = 0; done < elements; done += BLOCK_SPANS * PATCH_SPAN) {
            uint64_t left = elements - done, most = BLOCK_SPANS * PATCH_SPAN;
            uint64_t at = row * shape->stride + done * width;
            if (!encode_block(out, now + row * shape->row_bytes + done * width, base + at, to + at,
                              (uint32_t)(left < most ? left : most), row * elements + done, chain,
                              links, width, differs)) {
                return false;
            }
        }
    }
    return true;
}

typedef bool (*encoder)(struct patch_out *out, const struct patch_shape *shape, const uint8_t *now,
                        uint8_t *base, uint8_t *to, struct patch_in *chain, uint32_t links);

#define DEFINE_ENCODER(name, attribute, width, differs)                                          \
    attribute static bool name(struct patch_out *out, const struct patch_shape *shape,           \
                               const uint8_t *now, uint8_t *base, uint8_t *to,                   \
                               struct patch_in *chain, uint32_t links) {                         \
        return encode_rows(out, shape, now, base, to, chain, links, width, differs);             \
    }
DEFINE_ENCODER(encode_1, , 1, DIFFER)
DEFINE_ENCODER(encode_2, , 2, DIFFER)
DEFINE_ENCODER(encode_4, , 4, DIFFER)
#ifdef HAVE_AVX2
DEFINE_ENCODER(encode_1_avx2, AVX2, 1, differ_avx2)
DEFINE_ENCODER(encode_2_avx2, AVX2, 2, differ_avx2)
DEFINE_ENCODER(encode_4_avx2, AVX2, 4, differ_avx2)
#endif

static encoder encoder_of(uint32_t width) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        return width == 1 ? encode_1_avx2 : width == 2 ? encode_2_avx2 : encode_4_avx2;
    }
#endif
    return width == 1 ? encode_1 : width == 2 ? encode_2 : encode_4;
}

bool patch_encode(struct patch_out *out, const struct patch_shape *shape, const uint8_t *now,
                  const uint8_t *base, uint8_t *to, struct patch_in *chain, uint32_t links) {
    /* Written through only where it is `to`. */
    uint8_t *compared = (uint8_t *)(uintptr_t)base;
    bool done = encoder_of(shape->width)(out, shape, now, compared, to, chain, links);
    copy_fence();
    return done;
}

/* Changes that are decoded and not made yet: memory takes longer to answer than they take to
 * decode, and where they are sparse there is nothing else to do meanwhile. */
struct batch {
    uint32_t count;
    uint32_t values[BATCH];
    uint64_t places[BATCH]; /* element of the row */
};

INLINE void make_changes(struct patch_in *in, struct batch *batch, uint8_t *row, uint64_t first,
                         const uint32_t width) {
    uint64_t digest = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        uint8_t *at = row + batch->places[i] * width;
        digest += mixed(load(at, 0, width), first + batch->places[i]);
        store(at, 0, batch->values[i], width);
    }
    in->base_digest += digest;
    batch->count = 0;
}

/* Counts of 0, eight at a time: most spans have one where little changed. */
INLINE uint64_t unchanged_spans(const uint8_t *at, const uint8_t *end, uint64_t spans) {
    uint64_t found = 0, word;
    for (; spans - found >= 8 && end - at >= 8; found += 8, at += 8) {
        memcpy(&word, at, 8);
        if (word != 0) {
            break;
        }
    }
    return found;
}

/* Decodes a span's places into the batch, which is emptied where it is full. */
INLINE bool decode_span(struct patch_in *in, struct batch *batch, uint8_t *row, uint64_t done,
                        uint32_t elements, uint64_t first, const uint32_t width) {
    const uint8_t *at = in->at;
    uint32_t count = *at++;
    if ((uint64_t)(in->end - at) < (uint64_t)count * (1 + width)) {
        return false;
    }
    for (uint32_t n = 0; n < count; n++, at += 1 + width) {
        uint32_t place = at[0];
        if (place >= elements) {
            return false;
        }
        if (batch->count == BATCH) {
            make_changes(in, batch, row, first, width);
        }
        __builtin_prefetch(row + (done + place) * width, 1);
        batch->places[batch->count] = done + place;
        batch->values[batch->count++] = load(at + 1, 0, width);
    }
    in->at = at;
    return true;
}

INLINE bool apply_row(struct patch_in *in, uint8_t *row, uint64_t elements, uint64_t first,
                      const uint32_t width) {
    struct batch batch;
    batch.count = 0;
    uint64_t done = 0;
    while (done < elements) {
        uint64_t spans = unchanged_spans(in->at, in->end, (elements - done) / PATCH_SPAN);
        in->at += spans;
        done += spans * PATCH_SPAN;
        if (done == elements) {
            break;
        }
        uint32_t span = elements - done < PATCH_SPAN ? (uint32_t)(elements - done) : PATCH_SPAN;
        bool good = in->at != in->end;
        if (good && *in->at == PATCH_ALL) {
            make_changes(in, &batch, row, first, width);
            good = apply_span(in, row + done * width, span, first + done, width);
        } else if (good) {
            good = decode_span(in, &batch, row, done, span, first, width);
        }
        if (!good) {
            in->damaged = true;
            return false;
        }
        done += span;
    }
    make_changes(in, &batch, row, first, width);
    return true;
}

INLINE bool apply_rows(struct patch_in *in, const struct patch_shape *shape, uint8_t *to,
                       const uint32_t width) {
    uint64_t elements = shape->row_bytes / width;
    for (uint64_t row = 0; row < shape->rows; row++) {
        if (!apply_row(in, to + row * shape->stride, elements, row * elements, width)) {
            return false;
        }
    }
    return true;
}

bool patch_apply(struct patch_in *in, const struct patch_shape *shape, uint8_t *to) {
    return shape->width == 1   ? apply_rows(in, shape, to, 1)
           : shape->width == 2 ? apply_rows(in, shape, to, 2)
                               : apply_rows(in, shape, to, 4);
}

void patch_copy(const struct patch_shape *shape, const uint8_t *now, uint8_t *to) {
    for (uint64_t row = 0; row < shape->rows; row++) {
        copy_non_temporal(to + row * shape->stride, now + row * shape->row_bytes,
                          (size_t)shape->row_bytes);
    }
    copy_fence();
}

uint64_t patch_stream_bytes(const struct patch_shape *shape, uint64_t changes) {
    uint64_t elements = shape->row_bytes / shape->width;
    uint64_t spans = elements / PATCH_SPAN + (elements % PATCH_SPAN != 0);
    return shape->rows * spans + changes * (1 + shape->width);
}
