/* Writing the intents, and replaying them (see intent_log.h). */
#include "intent_log.h"

#include "base/checksum.h"
#include "base/failpoints.h"
#include "reader.h"
#include "relay_journal.h"

static bool unpack_ref(const struct segment *segment, uint64_t ref, struct record_place *place) {
    *place = place_unpack(ref);
    return place->extent < segment->extent_count &&
           place->offset <= (segment->extent_count - place->extent) * segment->extent_bytes -
                                sizeof(struct record_header);
}

static uint32_t intent_crc(const struct segment *segment, uint32_t n) {
    const struct bus_header *header = segment->header;
    uint64_t about[4] = {((uint64_t)n << 32) | header->intent_reason, header->intent_base,
                         header->intent_split, header->intent_split_base};
    uint32_t crc = shmbus_crc32c(0, about, sizeof about);
    return shmbus_crc32c(crc, (const void *)segment->intent_log, (size_t)n * 8);
}

/* The counter of a split; NULL if the split is invalid. */
static _Atomic uint64_t *split_counter(const struct segment *segment, uint32_t split,
                                       uint32_t reason) {
    struct split_entry *entry = split < SHMBUS_MAX_SPLITS ? &segment->splits[split] : NULL;
    return entry == NULL ? NULL : reason == SHMBUS_ACKED ? &entry->acked : &entry->dropped;
}

static void count_release(struct segment *segment, uint32_t n, uint32_t reason, uint32_t split) {
    struct bus_header *header = segment->header;
    _Atomic uint64_t *of_split = split_counter(segment, split, reason);
    SET_RELAXED(header->released[reason], header->intent_base + n);
    if (of_split != NULL) {
        SET_RELAXED(*of_split, header->intent_split_base + n);
    }
}

void intent_log_release(struct segment *segment, const struct record_ref *const *refs, uint32_t n,
                        enum shmbus_reason reason, uint32_t split) {
    struct bus_header *header = segment->header;
    _Atomic uint64_t *of_split = split_counter(segment, split, (uint32_t)reason);
    for (uint32_t i = 0; i < n; i++) {
        SET_RELAXED(segment->intent_log[i], place_pack(&refs[i]->place));
    }
    header->intent_reason = (uint32_t)reason;
    header->intent_base = RELAXED(header->released[reason]);
    header->intent_split = split;
    header->intent_split_base = of_split == NULL ? 0 : RELAXED(*of_split);
    header->intent_crc = intent_crc(segment, n);
    FAILPOINT("release-logged");
    /* SYNC: release-intended. From here on this reader or the next releases every record. */
    SET_RELEASE(header->intent_count, n);
    FAILPOINT("release-intended");
    for (uint32_t i = 0; i < n; i++) {
        struct record_header *record = record_of(segment, &refs[i]->place);
        if (record->flags >> SHMBUS_FLAG_RELAY_SHIFT != 0) {
            relay_record_ended(segment, record, (uint32_t)reason);
        }
        SET_RELAXED(record->state, SHMBUS_RELEASED);
        FAILPOINT("release-half");
    }
    count_release(segment, n, (uint32_t)reason, split);
    FAILPOINT("release-counted");
    SET_RELEASE(header->intent_count, 0);
}

/* Releases a record still committed: the place may already hold another record. */
static void end_committed(struct record_header *record) {
    uint32_t state = RELAXED(record->state);
    if (shmbus_is_committed(state)) {
        EXCHANGE(record->state, state, SHMBUS_RELEASED, memory_order_relaxed);
    }
}

static void replay_release(struct segment *segment) {
    struct bus_header *header = segment->header;
    /* SYNC: release-intended. */
    uint32_t n = ACQUIRE(header->intent_count);
    uint32_t reason = header->intent_reason;
    uint32_t split = header->intent_split;
    if (n == 0 || n > SHMBUS_MAX_GROUP_SIZE || reason >= SHMBUS_REASONS ||
        header->intent_crc != intent_crc(segment, n)) {
        SET_RELEASE(header->intent_count, 0);
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint64_t ref = RELAXED(segment->intent_log[i]);
        struct record_place place;
        if (!unpack_ref(segment, ref, &place)) {
            continue;
        }
        struct record_header *record = record_of(segment, &place);
        if (record->flags >> SHMBUS_FLAG_RELAY_SHIFT != 0) {
            relay_record_ended(segment, record, reason);
        }
        end_committed(record);
    }
    count_release(segment, n, reason, split);
    SET_RELEASE(header->intent_count, 0);
}

/* A death half way leaks no extent: the log holds the words, and each word frees only once. */
static void free_words(struct segment *segment, uint32_t first, uint32_t span) {
    for (uint32_t i = span; i-- > 0;) {
        extent_unlease(segment, first + i, RELAXED(segment->intent_log[i]));
        FAILPOINT("free-half");
    }
    SET_RELEASE(segment->header->free_span, 0);
}

void intent_log_free(struct segment *segment, uint32_t first, uint32_t span, uint64_t word) {
    SET_RELAXED(segment->intent_log[0], word);
    for (uint32_t i = 1; i < span; i++) {
        uint64_t tail = RELAXED(segment->extents[first + i].word);
        /* Skip an extent of another slot: no word matches 0. */
        tail = link_low(tail) == link_low(word) ? tail : 0;
        SET_RELAXED(segment->intent_log[i], tail);
    }
    segment->header->free_first = first;
    /* SYNC: free-intended. The log holds the words before the span makes them count. */
    SET_RELEASE(segment->header->free_span, span);
    free_words(segment, first, span);
}

static void replay_free(struct segment *segment) {
    struct bus_header *header = segment->header;
    /* SYNC: free-intended. */
    uint32_t span = ACQUIRE(header->free_span);
    uint32_t first = header->free_first;
    if (span > SHMBUS_MAX_GROUP_SIZE || span > segment->extent_count ||
        first > segment->extent_count - span) {
        span = 0;
    }
    free_words(segment, first, span);
}

void intent_log_begin_move(struct segment *segment, const struct record_place *from,
                           const struct record_place *to) {
    struct bus_header *header = segment->header;
    header->move_to = place_pack(to);
    header->move_generation = to->generation;
    /* SYNC: move-intended. Once published, the second copy replaces the first. */
    SET_RELEASE(header->move_from, place_pack(from) + 1);
    FAILPOINT("move-intended");
}

void intent_log_end_move(struct segment *segment) {
    SET_RELEASE(segment->header->move_from, 0);
}

/* A dead mover left one copy or two. With two, the first copy ends here, before a walk can deliver
 * the second: the second might be acknowledged and gone when a walk reaches the first. */
static void replay_move(struct segment *segment) {
    struct bus_header *header = segment->header;
    struct record_place from, to;
    /* SYNC: move-intended. */
    uint64_t ref = ACQUIRE(header->move_from);
    if (ref != 0 && unpack_ref(segment, ref - 1, &from) &&
        unpack_ref(segment, header->move_to, &to)) {
        const struct extent_desc *desc = &segment->extents[to.extent];
        uint64_t word = ACQUIRE(desc->word);
        if (link_generation(word) == header->move_generation && to.offset < ACQUIRE(desc->used)) {
            end_committed(record_of(segment, &from));
        }
    }
    intent_log_end_move(segment);
}

void intent_log_replay(struct segment *segment) {
    replay_release(segment);
    replay_free(segment);
    replay_move(segment);
}
