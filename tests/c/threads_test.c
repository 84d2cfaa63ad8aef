/* Threads that share the pieces of a job: each piece once, and helpers that end. */
#define _GNU_SOURCE
#include "batch/threads.h"
#include "support.h"

#define MOST_PIECES 64u
#define ROUNDS 5000

/* Not atomic: ThreadSanitizer sees whether what a piece wrote is visible to who has the job. */
static void count_piece(void *job, uint32_t piece) {
    ((int *)job)[piece]++;
}

static void run_once(struct threads *threads, uint32_t pieces) {
    int done[MOST_PIECES] = {0};
    threads_run(threads, pieces, count_piece, done);
    for (uint32_t i = 0; i < MOST_PIECES; i++) {
        CHECK(done[i] == (i < pieces));
    }
}

static void each_piece_is_done_once(uint64_t *seed) {
    struct threads *threads = threads_start(3);
    CHECK(threads != NULL);
    for (int round = 0; round < ROUNDS; round++) {
        run_once(threads, (uint32_t)(next_random(seed) % (MOST_PIECES + 1)));
    }
    threads_end(threads);
}

static void helpers_end_whatever_they_were_at(void) {
    for (int round = 0; round < 100; round++) {
        struct threads *threads = threads_start(4);
        CHECK(threads != NULL);
        run_once(threads, round % 2 == 0 ? MOST_PIECES : 0);
        threads_end(threads);
    }
    threads_end(NULL);
    run_once(NULL, MOST_PIECES);
}

int main(void) {
    uint64_t seed = test_seed();
    each_piece_is_done_once(&seed);
    helpers_end_whatever_they_were_at();
    puts("threads_test: passed");
    return 0;
}
