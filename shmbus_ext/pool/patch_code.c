/* Finding, packing and applying changes (see patch_code.h).
 *
 * Code for an element or a span is inlined with a constant element width, once for every
 * instruction set of the comparison: only loads and comparisons remain in the loops. The number of
 * changes in a span is random: a loop over the changes ends in a mispredicted branch, as expensive
 * as a comparison of the span. Therefore places are found and read several at a time, even beyond
 * the actual number, and later places overwrite the surplus. */
#include "pool/patch_code.h"

#include "pool/patch_elements.h"
#include "base/copy.h"

#define BLOCK_SPANS PATCH_BLOCK_SPANS
#define BLOCK_ELEMENTS (BLOCK_SPANS * PATCH_SPAN)
/* Prefetch distance of a comparison: the bytes compared during one memory access. */
#define AHEAD_BYTES 1024u
#define LINE_BYTES 64u
/* Places found at a time in 64 elements, and read at a time: more are rare. */
#define FOUND_AT_ONCE 2u
#define READ_AT_ONCE 8u
#define COPIED_AT_ONCE 64u
/* Changes prefetched before the first change is made, and the most blocks they span: a memory
 * access takes longer than a change. */
#define LOT_CHANGES 128u
#define LOT_BLOCKS 1024u
/* A block with more changes is applied at once: the hardware prefetches its neighbouring lines. */
#define SPARSE_CHANGES 256u

/* The largest count of places that costs less than the span's full values. */
INLINE uint32_t most_places(const uint32_t width) {
    return PATCH_SPAN * width / (1 + width);
}

INLINE uint32_t spans_of(uint32_t elements) {
    return (elements + PATCH_SPAN - 1) / PATCH_SPAN;
}

INLINE uint32_t span_at(uint32_t elements, uint32_t span) {
    uint32_t left = elements - span * PATCH_SPAN;
    return left < PATCH_SPAN ? left : PATCH_SPAN;
}

/* One checked block of a stream: copied counts of its spans, then pointers to places and values. */
struct block {
    uint8_t counts[BLOCK_SPANS];
    uint32_t changes; /* with places */
    bool dense;       /* contains a span with full values */
    const uint8_t *places;
    const uint8_t *values;
};

/* Reads a block's counts, several at a time; false if bytes are missing. */
INLINE bool next_block(struct patch_in *in, struct block *block, uint32_t elements,
                       const uint32_t width) {
    uint32_t spans = spans_of(elements), sum = 0, all = 0;
    if ((uint64_t)(in->end - in->at) < spans) {
        return false;
    }
    if (spans == BLOCK_SPANS) {
        memcpy(block->counts, in->at, BLOCK_SPANS);
    } else {
        memset(block->counts, 0, sizeof block->counts);
        memcpy(block->counts, in->at, spans);
    }
    for (uint32_t i = 0; i < BLOCK_SPANS; i++) {
        sum += block->counts[i];
        all += block->counts[i] == PATCH_ALL;
    }
    uint64_t values = block->changes = sum - all * PATCH_ALL;
    block->dense = all > 0;
    for (uint32_t span = 0; all > 0 && span < spans; span++) {
        values += block->counts[span] == PATCH_ALL ? span_at(elements, span) : 0;
    }
    block->places = in->at + spans;
    block->values = block->places + block->changes;
    if ((uint64_t)(in->end - block->places) < block->changes + values * width) {
        return false;
    }
    in->at = block->values + values * width;
    return true;
}

/* Converts places to elements, from the block's element `first`. `elements_at` holds room for
 * READ_AT_ONCE more; `end` ends the stream. False for a place outside of the block. */
INLINE bool read_places(const struct block *block, uint32_t elements, uint32_t first,
                        const uint8_t *end, uint32_t *elements_at) {
    const uint8_t *at = block->places;
    uint32_t done = 0;
    for (uint32_t span = 0; span < spans_of(elements); span++) {
        uint32_t count = block->counts[span], start = first + span * PATCH_SPAN, n = 0;
        count = count == PATCH_ALL ? 0 : count;
        do {
            if (end - at < (int64_t)(n + READ_AT_ONCE)) {
                for (; n < count; n++) {
                    elements_at[done + n] = start + at[n];
                }
            } else {
                for (uint32_t i = 0; i < READ_AT_ONCE; i++) {
                    elements_at[done + n + i] = start + at[n + i];
                }
                n += READ_AT_ONCE;
            }
        } while (n < count);
        done += count;
        at += count;
    }
    /* Only a short span can contain places outside. */
    for (uint32_t i = 0; elements % PATCH_SPAN != 0 && i < done; i++) {
        if (elements_at[i] - first >= elements) {
            return false;
        }
    }
    return true;
}

/* Makes changes of a block; returns the digest of the old elements. */
INLINE uint64_t make_changes(uint8_t *to, uint64_t first, const uint32_t *elements_at,
                             const uint8_t *values, uint32_t count, const uint32_t width) {
    uint64_t digest = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = elements_at[i];
        digest += mixed(load(to, at, width), first + at);
        store(to, at, load(values, i, width), width);
    }
    return digest;
}

/* Makes the changes of a block, including spans with full values. */
INLINE uint64_t make_dense(uint8_t *to, uint64_t first, const struct block *block,
                           const uint32_t *elements_at, uint32_t elements, const uint32_t width) {
    uint64_t digest = 0;
    const uint8_t *values = block->values;
    for (uint32_t span = 0; span < spans_of(elements); span++) {
        uint32_t count = block->counts[span], here = span_at(elements, span);
        if (count != PATCH_ALL) {
            digest += make_changes(to, first, elements_at, values, count, width);
            elements_at += count;
            values += (uint64_t)count * width;
            continue;
        }
        uint8_t *at = to + (uint64_t)span * PATCH_SPAN * width;
        for (uint32_t i = 0; i < here; i++) {
            digest += mixed(load(at, i, width), first + span * PATCH_SPAN + i);
        }
        memcpy(at, values, (size_t)here * width);
        values += (uint64_t)here * width;
    }
    return digest;
}

/* Applies one block at once. */
INLINE bool apply_block(struct patch_in *in, const struct block *block, uint8_t *to,
                        uint32_t elements, uint64_t first, const uint32_t width) {
    uint32_t elements_at[BLOCK_ELEMENTS + READ_AT_ONCE];
    if (!read_places(block, elements, 0, in->end, elements_at)) {
        return false;
    }
    in->base_digest +=
        block->dense ? make_dense(to, first, block, elements_at, elements, width)
                     : make_changes(to, first, elements_at, block->values, block->changes, width);
    return true;
}

/* The hardware prefetches only within a page, and a comparison outpaces memory. */
INLINE void ask_for(const uint8_t *one, const uint8_t *other, uint32_t bytes) {
    for (uint32_t at = 0; at < bytes; at += LINE_BYTES) {
        __builtin_prefetch(one + at);
        __builtin_prefetch(other + at);
    }
}

/* The differences in a block. */
struct changes {
    uint32_t count;
    bool dense;                    /* contains a span packed with full values */
    uint16_t in_span[BLOCK_SPANS]; /* changes by span */
    uint16_t elements_at[BLOCK_ELEMENTS + FOUND_AT_ONCE];
};

INLINE void find_changes(struct changes *found, const uint8_t *now, const uint8_t *base,
                         uint32_t elements, const uint32_t width, differ differs) {
    uint32_t done = 0;
    found->dense = false;
    for (uint32_t span = 0; span < spans_of(elements); span++) {
        uint32_t before = done, start = span * PATCH_SPAN, end = start + span_at(elements, span);
        uint64_t ahead = (uint64_t)(start + BLOCK_ELEMENTS) * width + AHEAD_BYTES;
        ask_for(now + ahead, base + ahead, PATCH_SPAN * width);
        uint64_t bits[PATCH_SPAN / WORD_BITS] = {0}, any = 0;
        for (uint32_t at = start, word = 0; at < end; at += WORD_BITS, word++) {
            bits[word] = differ_some(now + (uint64_t)at * width, base + (uint64_t)at * width,
                                     end - at, width, differs);
            any |= bits[word];
        }
        for (uint32_t word = 0; any != 0 && word < PATCH_SPAN / WORD_BITS; word++) {
            uint64_t left = bits[word];
            uint32_t count = (uint32_t)__builtin_popcountll(left), n = 0;
            do {
                for (uint32_t i = 0; i < FOUND_AT_ONCE; i++, left &= left - 1) {
                    uint32_t at = start + word * WORD_BITS + lowest(left);
                    found->elements_at[done + n++] = (uint16_t)at;
                }
            } while (n < count);
            done += count;
        }
        found->in_span[span] = (uint16_t)(done - before);
        found->dense |= done - before > most_places(width);
    }
    found->count = done;
}

/* Packs the values of changed elements; in place, also stores them at base. */
INLINE uint64_t pack_values(uint8_t *to, const uint8_t *now, uint8_t *base, bool in_place,
                            uint64_t first, const uint16_t *elements_at, uint32_t count,
                            const uint32_t width) {
    uint64_t digest = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = elements_at[i], value = load(now, at, width);
        digest += mixed(load(base, at, width), first + at);
        store(to, i, value, width);
        if (in_place) {
            store(base, at, value, width);
        }
    }
    return digest;
}

/* Packs a block with spans of full values, changed or not. */
INLINE bool pack_dense(struct patch_out *out, const uint8_t *now, uint8_t *base, bool in_place,
                       const struct changes *found, uint32_t elements, uint64_t first,
                       const uint32_t width) {
    uint32_t spans = spans_of(elements), places = 0, values = 0;
    const uint16_t *elements_at = found->elements_at;
    uint8_t counts[BLOCK_SPANS];
    for (uint32_t span = 0; span < spans; span++) {
        bool all = found->in_span[span] > most_places(width);
        counts[span] = all ? PATCH_ALL : (uint8_t)found->in_span[span];
        places += all ? 0 : counts[span];
        values += all ? span_at(elements, span) : counts[span];
    }
    if ((uint64_t)(out->end - out->at) < spans + places + (uint64_t)values * width) {
        return false;
    }
    uint8_t *place = out->at + spans, *value = place + places;
    memcpy(out->at, counts, spans);
    for (uint32_t span = 0; span < spans; span++) {
        uint64_t offset = (uint64_t)span * PATCH_SPAN * width;
        uint32_t here = span_at(elements, span), count = counts[span];
        if (count != PATCH_ALL) {
            for (uint32_t i = 0; i < count; i++) {
                *place++ = (uint8_t)elements_at[i];
            }
            out->base_digest += pack_values(value, now, base, in_place, first, elements_at, count,
                                            width);
            value += (uint64_t)count * width;
            elements_at += count;
            continue;
        }
        for (uint32_t i = 0; i < here; i++) {
            uint32_t at = span * PATCH_SPAN + i;
            out->base_digest += mixed(load(base, at, width), first + at);
        }
        elements_at += found->in_span[span];
        memcpy(value, now + offset, (size_t)here * width);
        if (in_place) {
            memcpy(base + offset, now + offset, (size_t)here * width);
        }
        value += (uint64_t)here * width;
    }
    out->at = value;
    return true;
}

/* Packs the changes of one block; in place, also stores them at base. False without room. */
INLINE bool pack_block(struct patch_out *out, const uint8_t *now, uint8_t *base, bool in_place,
                       uint32_t elements, uint64_t first, const uint32_t width, differ differs) {
    struct changes found;
    find_changes(&found, now, base, elements, width, differs);
    uint32_t spans = spans_of(elements), changes = found.count;
    if (found.dense) {
        out->full = !pack_dense(out, now, base, in_place, &found, elements, first, width);
    } else {
        out->full = (uint64_t)(out->end - out->at) < spans + (uint64_t)changes * (1 + width);
    }
    if (!found.dense && !out->full) {
        uint8_t *places = out->at + spans, *values = places + changes;
        for (uint32_t i = 0; i < spans; i++) {
            out->at[i] = (uint8_t)found.in_span[i];
        }
        for (uint32_t i = 0; i < changes; i++) {
            places[i] = (uint8_t)found.elements_at[i];
        }
        out->base_digest +=
            pack_values(values, now, base, in_place, first, found.elements_at, changes, width);
        out->at = values + (uint64_t)changes * width;
    }
    out->changes += changes;
    return !out->full;
}

/* One block of a row: catch up, compare, write. */
INLINE bool encode_block(struct patch_out *out, const uint8_t *now, uint8_t *base, uint8_t *to,
                         uint32_t elements, uint64_t first, struct patch_in *chain,
                         uint32_t links, const uint32_t width, differ differs) {
    for (uint32_t i = 0; i < links; i++) {
        struct block block;
        if (!next_block(&chain[i], &block, elements, width) ||
            !apply_block(&chain[i], &block, to, elements, first, width)) {
            chain[i].damaged = true;
            return false;
        }
    }
    if (!pack_block(out, now, base, base == to, elements, first, width, differs)) {
        return false;
    }
    if (base != to) {
        copy_non_temporal(to, now, (size_t)elements * width);
    }
    return true;
}

INLINE bool encode_rows(struct patch_out *out, const struct patch_shape *shape,
                        const uint8_t *now, uint8_t *base, uint8_t *to, struct patch_in *chain,
                        uint32_t links, const uint32_t width, differ differs) {
    uint64_t elements = shape->row_bytes / width;
    for (uint64_t row = 0; row < shape->rows; row++) {
        for (uint64_t done = 0; done < elements; done += BLOCK_ELEMENTS) {
            uint64_t left = elements - done;
            uint32_t here = left < BLOCK_ELEMENTS ? (uint32_t)left : BLOCK_ELEMENTS;
            uint64_t at = row * shape->stride + done * width;
            const uint8_t *from = now + row * shape->row_bytes + done * width;
            if (!encode_block(out, from, base + at, to + at, here, row * elements + done, chain,
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
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("popcnt")) {
        return width == 1 ? encode_1_avx2 : width == 2 ? encode_2_avx2 : encode_4_avx2;
    }
#endif
    return width == 1 ? encode_1 : width == 2 ? encode_2 : encode_4;
}

bool patch_encode(struct patch_out *out, const struct patch_shape *shape, const uint8_t *now,
                  const uint8_t *base, uint8_t *to, struct patch_in *chain, uint32_t links) {
    /* Written only if equal to `to`. */
    uint8_t *compared = (uint8_t *)(uintptr_t)base;
    bool done = encoder_of(shape->width)(out, shape, now, compared, to, chain, links);
    copy_fence();
    return done;
}

/* Pending changes of several blocks. */
struct lot {
    uint32_t changes;
    uint32_t blocks;
    uint64_t start; /* origin of the places, an element of the row */
    uint32_t elements_at[LOT_CHANGES + SPARSE_CHANGES + READ_AT_ONCE];
    uint8_t values[(LOT_CHANGES + SPARSE_CHANGES) * sizeof(uint32_t) + COPIED_AT_ONCE];
};

/* Adds a block's changes. False for a place outside of the block. */
INLINE bool add_to_lot(struct lot *lot, const struct block *block, uint64_t done,
                       uint32_t elements, const uint8_t *end, const uint32_t width) {
    if (lot->blocks == 0) {
        lot->start = done;
    }
    if (!read_places(block, elements, (uint32_t)(done - lot->start), end,
                     lot->elements_at + lot->changes)) {
        return false;
    }
    uint8_t *values = lot->values + lot->changes * width;
    uint32_t bytes = block->changes * width, at = 0;
    for (; at < bytes && end - block->values >= (int64_t)(at + COPIED_AT_ONCE);
         at += COPIED_AT_ONCE) {
        memcpy(values + at, block->values + at, COPIED_AT_ONCE);
    }
    if (at < bytes) {
        memcpy(values + at, block->values + at, bytes - at);
    }
    lot->changes += block->changes;
    lot->blocks++;
    return true;
}

INLINE void ask_for_lot(const struct lot *lot, const uint8_t *row, const uint32_t width) {
    for (uint32_t i = 0; i < lot->changes; i++) {
        __builtin_prefetch(row + (lot->start + lot->elements_at[i]) * width, 1);
    }
}

INLINE void make_lot(struct patch_in *in, struct lot *lot, uint8_t *row, uint64_t first,
                     const uint32_t width) {
    in->base_digest += make_changes(row + lot->start * width, first + lot->start,
                                    lot->elements_at, lot->values, lot->changes, width);
    lot->changes = 0;
    lot->blocks = 0;
}

/* Applies a row's blocks; the prefetch of one lot overlaps with the changes of the previous lot. */
INLINE bool apply_row(struct patch_in *in, uint8_t *row, uint64_t elements, uint64_t first,
                      const uint32_t width) {
    struct lot lots[2];
    struct lot *lot = &lots[0], *asked = &lots[1];
    bool good = true;
    lot->blocks = lot->changes = asked->blocks = asked->changes = 0;
    for (uint64_t done = 0; good && done < elements; done += BLOCK_ELEMENTS) {
        uint64_t left = elements - done;
        uint32_t here = left < BLOCK_ELEMENTS ? (uint32_t)left : BLOCK_ELEMENTS;
        struct block block;
        good = next_block(in, &block, here, width);
        if (!good || (block.changes == 0 && !block.dense)) {
            continue;
        }
        if (block.dense || block.changes > SPARSE_CHANGES) {
            good = apply_block(in, &block, row + done * width, here, first + done, width);
            continue;
        }
        good = add_to_lot(lot, &block, done, here, in->end, width);
        if (lot->changes >= LOT_CHANGES || lot->blocks == LOT_BLOCKS) {
            ask_for_lot(lot, row, width);
            make_lot(in, asked, row, first, width);
            struct lot *made = asked;
            asked = lot;
            lot = made;
        }
    }
    make_lot(in, asked, row, first, width);
    make_lot(in, lot, row, first, width);
    in->damaged = !good;
    return good;
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
