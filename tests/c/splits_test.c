/* Labels of splits: a number each, through any order of names and any death. */
#define _GNU_SOURCE
#include <pthread.h>

#include "bus.h"
#include "ring/observe.h"

#define THREADS 4u
#define ROUNDS 2000

static void forget(struct segment *segment) {
    memset(&segment->splits[1], 0, (SHMBUS_MAX_SPLITS - 1) * sizeof segment->splits[0]);
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

static void labels_agree(struct bus *bus) {
    a_label_that_was_begun_is_none_and_is_ended_by_who_needs_it(&bus->segment);
    threads_that_name_at_once_agree(&bus->segment);
}

int main(void) {
    in_a_bus(4, 1, labels_agree);
    puts("splits_test: passed");
    return 0;
}
