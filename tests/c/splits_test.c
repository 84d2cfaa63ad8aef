/* Labels of splits: a number each, through any order of names and any death. */
#define _GNU_SOURCE
#include <pthread.h>

#include "ring/observe.h"
#include "ring/segment.h"
#include "support.h"

#define THREADS 4u
#define ROUNDS 2000

static void begin(struct segment *segment) {
    struct segment_geometry plan;
    CHECK(segment_plan(16u << 10, 1, SHMBUS_PAGE, &plan));
    CHECK(segment_create(segment, memory_file(), &plan) == SHARED_OK);
}

static void forget(struct segment *segment) {
    memset(&segment->splits[1], 0, (SHMBUS_MAX_SPLITS - 1) * sizeof segment->splits[0]);
}

static void what_is_named_is_found(struct segment *segment) {
    char label[SHMBUS_SPLIT_LABEL_BYTES + 1];
    static const char longest[] = "1234567890123456789012345678901";
    CHECK(sizeof longest - 1 == SHMBUS_SPLIT_LABEL_BYTES);
    CHECK(split_find(segment, "train", 5) == SHMBUS_SPLIT_TRAIN);
    CHECK(split_find(segment, "eval", 4) == SHMBUS_MAX_SPLITS);
    /* With a common beginning, and of every length. */
    for (uint32_t bytes = 1; bytes <= 15; bytes++) {
        CHECK(split_number(segment, longest, bytes * 2 + 1) == bytes);
        CHECK(split_number(segment, longest, bytes * 2 + 1) == bytes);
    }
    CHECK(split_number(segment, "one more", 8) == SHMBUS_MAX_SPLITS);
    for (uint32_t number = 1; number < SHMBUS_MAX_SPLITS; number++) {
        CHECK(split_label(segment, number, label) == number * 2 + 1);
        CHECK(memcmp(label, longest, number * 2 + 1) == 0 && label[number * 2 + 1] == 0);
    }
    CHECK(split_number(segment, "", 0) == SHMBUS_MAX_SPLITS);
    CHECK(split_number(segment, longest, 32) == SHMBUS_MAX_SPLITS);
    forget(segment);
}

/* A death in the middle leaves the first words of a label. */
static void a_label_that_was_begun_is_none_and_is_ended_by_who_needs_it(struct segment *segment) {
    char label[SHMBUS_SPLIT_LABEL_BYTES + 1];
    static const char name[] = "a label of four words, or so";
    uint32_t bytes = sizeof name - 1;
    uint64_t words[SHMBUS_SPLIT_LABEL_WORDS];
    CHECK(split_number(segment, name, bytes) == 1);
    memcpy(words, segment->splits[1].label, sizeof words);
    for (uint32_t written = 1; written < SHMBUS_SPLIT_LABEL_WORDS; written++) {
        forget(segment);
        memcpy(segment->splits[1].label, words, written * sizeof *words);
        CHECK(split_label(segment, 1, label) == 0);
        CHECK(split_find(segment, name, bytes) == SHMBUS_MAX_SPLITS);
        CHECK(split_number(segment, "another", 7) == 2);
        CHECK(split_number(segment, name, bytes) == 1);
        CHECK(split_label(segment, 1, label) == bytes && strcmp(label, name) == 0);
    }
    forget(segment);
}

struct namer {
    pthread_t thread;
    struct segment *segment;
    pthread_barrier_t *start;
    uint32_t number;
    char name[SHMBUS_SPLIT_LABEL_BYTES + 1];
};

static void *run_namer(void *argument) {
    struct namer *self = argument;
    pthread_barrier_wait(self->start);
    self->number = split_number(self->segment, self->name, (uint32_t)strlen(self->name));
    return NULL;
}

/* Labels with a common beginning: threads meet in an entry. */
static void threads_that_name_at_once_agree(struct segment *segment) {
    pthread_barrier_t start;
    CHECK(pthread_barrier_init(&start, NULL, THREADS) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        struct namer namers[THREADS] = {0};
        char label[SHMBUS_SPLIT_LABEL_BYTES + 1];
        for (uint32_t i = 0; i < THREADS; i++) {
            namers[i].segment = segment;
            namers[i].start = &start;
            snprintf(namers[i].name, sizeof namers[i].name, "evaluation, lane %c", "aab"[i % 3]);
            CHECK(pthread_create(&namers[i].thread, NULL, run_namer, &namers[i]) == 0);
        }
        for (uint32_t i = 0; i < THREADS; i++) {
            CHECK(pthread_join(namers[i].thread, NULL) == 0);
        }
        for (uint32_t i = 0; i < THREADS; i++) {
            CHECK(namers[i].number == 1 || namers[i].number == 2);
            CHECK(split_label(segment, namers[i].number, label) == strlen(namers[i].name));
            CHECK(strcmp(label, namers[i].name) == 0);
            CHECK(split_number(segment, namers[i].name, (uint32_t)strlen(label)) ==
                  namers[i].number);
        }
        forget(segment);
    }
    pthread_barrier_destroy(&start);
}

static void the_last_that_were_cancelled_are_known(struct segment *segment) {
    for (uint32_t i = 0; i < SHMBUS_CANCELLED + 5; i++) {
        cancelled_add(segment, group_key_hash("q", 1, (int64_t)i, 0));
    }
    for (uint32_t i = 0; i < SHMBUS_CANCELLED + 5; i++) {
        CHECK(cancelled_has(segment, group_key_hash("q", 1, (int64_t)i, 0)) == (i >= 5));
        CHECK(!cancelled_has(segment, group_key_hash("q", 1, (int64_t)i, 1)));
        CHECK(!cancelled_has(segment, group_key_hash("r", 1, (int64_t)i, 0)));
    }
    CHECK(group_key_hash("q\0", 2, 1, 0) != group_key_hash("q", 1, 1, 0));
}

int main(void) {
    struct segment segment;
    begin(&segment);
    what_is_named_is_found(&segment);
    a_label_that_was_begun_is_none_and_is_ended_by_who_needs_it(&segment);
    threads_that_name_at_once_agree(&segment);
    the_last_that_were_cancelled_are_known(&segment);
    puts("splits_test: passed");
    return 0;
}
