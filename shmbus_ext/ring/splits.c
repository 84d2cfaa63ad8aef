/* The labels of splits, word by word (see segment.h). */
#include "segment.h"

#include "base/failpoints.h"

static uint32_t words_of(uint32_t bytes) {
    return (1 + bytes + 7) / 8;
}

/* The length, the text, and zeros. */
static void encode(uint64_t words[SHMBUS_SPLIT_LABEL_WORDS], const char *label, uint32_t bytes) {
    memset(words, 0, SHMBUS_SPLIT_LABEL_WORDS * sizeof *words);
    memcpy(words, &(uint8_t){(uint8_t)bytes}, 1);
    memcpy((uint8_t *)words + 1, label, bytes);
}

/* Compares the entry's label; with `adds`, writes the label into empty words. */
static bool has_label(struct split_entry *entry, const uint64_t *words, uint32_t count,
                      bool adds) {
    for (uint32_t i = 0; i < count; i++) {
        /* SYNC: split-named. */
        uint64_t now = ACQUIRE(entry->label[i]);
        if (now == 0 && adds) {
            FAILPOINT("split-naming");
            /* SYNC: split-named. Records use a number only after its label. */
            if (atomic_compare_exchange_strong_explicit(&entry->label[i], &now, words[i],
                                                        memory_order_acq_rel,
                                                        memory_order_acquire)) {
                continue;
            }
        }
        if (now != words[i]) {
            return false;
        }
    }
    return true;
}

static uint32_t search(const struct segment *segment, const char *label, uint32_t bytes,
                       bool adds) {
    uint64_t words[SHMBUS_SPLIT_LABEL_WORDS];
    if (bytes < 1 || bytes > SHMBUS_SPLIT_LABEL_BYTES) {
        return SHMBUS_MAX_SPLITS;
    }
    encode(words, label, bytes);
    for (uint32_t number = 0; number < SHMBUS_MAX_SPLITS; number++) {
        if (has_label(&segment->splits[number], words, words_of(bytes), adds)) {
            return number;
        }
    }
    return SHMBUS_MAX_SPLITS;
}

uint32_t split_number(const struct segment *segment, const char *label, uint32_t bytes) {
    /* Search existing labels first, to avoid a second number for a label. */
    uint32_t found = search(segment, label, bytes, false);
    return found < SHMBUS_MAX_SPLITS ? found : search(segment, label, bytes, true);
}

void splits_begin(const struct segment *segment) {
    /* The first label gets number SHMBUS_SPLIT_TRAIN. */
    (void)split_number(segment, SHMBUS_SPLIT_TRAIN_LABEL, sizeof SHMBUS_SPLIT_TRAIN_LABEL - 1);
}

uint32_t split_find(const struct segment *segment, const char *label, uint32_t bytes) {
    return search(segment, label, bytes, false);
}

uint32_t split_label(const struct segment *segment, uint32_t number,
                     char label[SHMBUS_SPLIT_LABEL_BYTES + 1]) {
    uint64_t words[SHMBUS_SPLIT_LABEL_WORDS] = {0};
    uint8_t bytes = 0;
    if (number < SHMBUS_MAX_SPLITS) {
        for (uint32_t i = 0; i < SHMBUS_SPLIT_LABEL_WORDS; i++) {
            /* SYNC: split-named. */
            words[i] = ACQUIRE(segment->splits[number].label[i]);
        }
        memcpy(&bytes, words, 1);
    }
    uint32_t count = bytes > SHMBUS_SPLIT_LABEL_BYTES ? 0 : words_of(bytes);
    for (uint32_t i = 0; i < count; i++) {
        if (words[i] == 0) {
            return 0;
        }
    }
    if (count == 0) {
        return 0;
    }
    memcpy(label, (const uint8_t *)words + 1, bytes);
    label[bytes] = 0;
    return bytes;
}
