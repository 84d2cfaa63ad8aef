/* Helpers that share the pieces of a job: each piece once. */
#define _GNU_SOURCE
#include "batch/helpers.h"
#include "support.h"

#define MOST_PIECES 64u
#define ROUNDS 5000

/* Not atomic: ThreadSanitizer sees whether what a piece wrote is visible to who has the job. */
static void count_piece(void *job, uint32_t piece) {
    ((int *)job)[piece]++;
}

static void run_once(uint32_t threads, uint32_t pieces) {
    int done[MOST_PIECES] = {0};
    helpers_run(threads, pieces, count_piece, done);
    for (uint32_t i = 0; i < MOST_PIECES; i++) {
        CHECK(done[i] == (i < pieces));
    }
}

static void each_piece_is_done_once(uint64_t *seed) {
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t threads = (uint32_t)(next_random(seed) % 6);
        run_once(threads, (uint32_t)(next_random(seed) % (MOST_PIECES + 1)));
    }
}

int main(void) {
    uint64_t seed = test_seed();
    each_piece_is_done_once(&seed);
    puts("helpers_test: passed");
    return 0;
}
