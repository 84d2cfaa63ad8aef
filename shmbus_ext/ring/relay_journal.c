/* Writing and healing the journal, and noting ended records (see relay_journal.h). */
#include "ring/relay_journal.h"

#include "base/failpoints.h"
#include "ring/writer.h"

#define STATE_BITS 4
#define BATCH_BITS 28
#define BATCH_MASK ((UINT32_C(1) << BATCH_BITS) - 1)

_Static_assert(SHMBUS_MAX_PRODUCERS < 1u << 16, "a word has room for a slot");
_Static_assert(SHMBUS_RELAY_IDENTITY_BYTES == SHMBUS_IDENTITY_BYTES, "an entry names a bus");

static uint64_t make_word(uint32_t slot, uint32_t batch, enum relay_state state) {
    return (uint64_t)slot << 32 | (uint64_t)(batch & BATCH_MASK) << STATE_BITS | (uint64_t)state;
}

static enum relay_state state_of(uint64_t word) { return (enum relay_state)(word & 15u); }
static uint32_t batch_of(uint64_t word) { return (uint32_t)(word >> STATE_BITS) & BATCH_MASK; }

static uint64_t load_word(const struct segment *segment, uint32_t entry) {
    return ACQUIRE(segment->relay_entries[entry].word);
}

static void store_state(struct segment *segment, uint32_t entry, uint64_t word,
                        enum relay_state state) {
    uint64_t kept = word & ~(uint64_t)15;
    SET_RELEASE(segment->relay_entries[entry].word,
                state == RELAY_FREE ? 0 : kept | (uint64_t)state);
}

/* Returns true for an entry prepared for an intent that never came into force. */
static bool is_void(const struct segment *segment, uint64_t word) {
    /* SYNC: relay-intended. */
    uint32_t batch = ACQUIRE(segment->relay->batch);
    return state_of(word) == RELAY_PREPARED && batch_of(word) == ((batch + 1) & BATCH_MASK);
}

/* ---- intents ---- */

/* Returns a free entry, or relay_entry_count without one. The release order roughly follows the
 * order of use: the entry after the last one is usually free. A search from entry 0 would visit
 * every record held by the trainer, for every block. */
static uint32_t next_free(struct segment *segment) {
    const uint32_t count = segment->relay_entry_count;
    for (uint32_t looked = 0; looked < count; looked++) {
        const uint32_t entry = segment->relay_next < count ? segment->relay_next : 0;
        segment->relay_next = entry + 1;
        if (state_of(load_word(segment, entry)) == RELAY_FREE) {
            return entry;
        }
    }
    return count;
}

/* An entry's content besides its origin: the commit that writes the record, or the reason for no
 * commit. */
struct plan {
    uint64_t writer;
    uint64_t commit;
    uint64_t ended;
    uint32_t slot;
};

static bool prepare(struct segment *segment, const struct plan *plan,
                    const struct relay_origin *origin, uint32_t *entry) {
    uint32_t batch = RELAXED(segment->relay->batch) + 1;
    enum relay_state state = RELAY_INTENDED;
    if (*entry == RELAY_NEW) {
        *entry = next_free(segment);
        state = RELAY_PREPARED;
    }
    if (*entry >= segment->relay_entry_count) {
        return false;
    }
    struct relay_entry *to = &segment->relay_entries[*entry];
    memcpy(to->identity, origin->identity, sizeof to->identity);
    to->producer_id = origin->producer_id;
    to->sequence = origin->sequence;
    to->commit = plan->commit;
    SET_RELAXED(to->ended, plan->ended);
    SET_RELAXED(to->writer, plan->writer);
    SET_RELEASE(to->word, make_word(plan->slot, batch, state));
    FAILPOINT("relay-prepared");
    return true;
}

/* Undoes prepared entries after a lack of room. */
static void take_back(struct segment *segment, const uint32_t *entries, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint64_t word = load_word(segment, entries[i]);
        store_state(segment, entries[i], word,
                    state_of(word) == RELAY_PREPARED ? RELAY_FREE : RELAY_OWED);
    }
}

static void bring_into_force(struct segment *segment) {
    uint32_t batch = RELAXED(segment->relay->batch);
    /* SYNC: relay-intended. From here on this sink or the next writes every record. */
    SET_RELEASE(segment->relay->batch, (batch + 1) & BATCH_MASK);
    FAILPOINT("relay-intended");
}

bool relay_intend(struct segment *segment, const struct writer *writer,
                  const struct relay_origin *origins, uint32_t *entries, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        const struct plan plan = {writer->producer_id, writer->committed + 1 + i, 0,
                                  writer->slot_index};
        if (!prepare(segment, &plan, &origins[i], &entries[i])) {
            take_back(segment, entries, i);
            return false;
        }
    }
    bring_into_force(segment);
    return true;
}

bool relay_drop(struct segment *segment, const struct relay_origin *origins, uint32_t *entries,
                uint32_t n, uint32_t reason) {
    /* Commit 0 lies below every lane's count: a reaper finds the entry settled. No producer uses id
     * 0. */
    const struct plan plan = {0, 0, reason + 1, 0};
    for (uint32_t i = 0; i < n; i++) {
        entries[i] = RELAY_NEW;
        if (!prepare(segment, &plan, &origins[i], &entries[i])) {
            take_back(segment, entries, i);
            return false;
        }
    }
    bring_into_force(segment);
    for (uint32_t i = 0; i < n; i++) {
        store_state(segment, entries[i], load_word(segment, entries[i]), RELAY_SETTLED);
    }
    return true;
}

void relay_settle(struct segment *segment, const struct writer *writer, const uint32_t *entries,
                  uint32_t n) {
    FAILPOINT("relay-put");
    for (uint32_t i = 0; i < n; i++) {
        uint64_t word = load_word(segment, entries[i]);
        if (segment->relay_entries[entries[i]].commit <= writer->committed) {
            store_state(segment, entries[i], word, RELAY_SETTLED);
            FAILPOINT("relay-settled");
        }
    }
}

void relay_forget(struct segment *segment, const uint32_t *entries, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        store_state(segment, entries[i], 0, RELAY_FREE);
        FAILPOINT("relay-forgotten");
    }
}

bool relay_read(const struct segment *segment, uint32_t entry, struct relay_note *note) {
    uint64_t word = load_word(segment, entry);
    const struct relay_entry *from = &segment->relay_entries[entry];
    if (state_of(word) == RELAY_FREE || state_of(word) > RELAY_SETTLED || is_void(segment, word)) {
        return false;
    }
    memcpy(note->origin.identity, from->identity, SHMBUS_IDENTITY_BYTES);
    note->origin.producer_id = from->producer_id;
    note->origin.sequence = from->sequence;
    note->state = state_of(word) == RELAY_PREPARED ? RELAY_INTENDED : state_of(word);
    /* SYNC: relay-ended. */
    note->ended = (uint32_t)ACQUIRE(from->ended);
    return true;
}

/* ---- others ---- */

void relay_reap(struct segment *segment, uint64_t producer_id, uint64_t committed) {
    struct relay_journal *journal = segment->relay;
    if (ACQUIRE(journal->writer) != producer_id) {
        return;
    }
    for (uint32_t i = 0; i < segment->relay_entry_count; i++) {
        uint64_t word = load_word(segment, i);
        if (is_void(segment, word)) {
            store_state(segment, i, word, RELAY_FREE);
        } else if (state_of(word) == RELAY_PREPARED || state_of(word) == RELAY_INTENDED) {
            bool is_put = segment->relay_entries[i].commit <= committed;
            store_state(segment, i, word, is_put ? RELAY_SETTLED : RELAY_OWED);
            FAILPOINT("relay-healing");
        }
    }
    SET_RELEASE(journal->writer, 0);
}

bool relay_origin_of(const struct segment *segment, const struct record_header *record,
                     struct relay_origin *origin) {
    uint32_t entry = (record->flags >> SHMBUS_FLAG_RELAY_SHIFT) - 1;
    struct relay_note note;
    if (entry >= segment->relay_entry_count || !relay_read(segment, entry, &note)) {
        return false;
    }
    /* The source may have released the record since, and the entry may name another record. */
    const struct relay_entry *from = &segment->relay_entries[entry];
    *origin = note.origin;
    return RELAXED(from->writer) == record->producer_id && from->commit == record->lane_number + 1;
}

void relay_record_ended(struct segment *segment, const struct record_header *record,
                        uint32_t reason) {
    uint32_t entry = (record->flags >> SHMBUS_FLAG_RELAY_SHIFT) - 1;
    if (entry >= segment->relay_entry_count ||
        RELAXED(segment->relay_entries[entry].writer) != record->producer_id) {
        return;
    }
    /* SYNC: relay-ended. */
    SET_RELEASE(segment->relay_entries[entry].ended, reason + 1);
    atomic_fetch_add_explicit(&segment->relay->ended, 1, memory_order_release);
}
