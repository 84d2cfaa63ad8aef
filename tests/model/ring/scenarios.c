/* The scenarios of the ring, and the segment of a scenario. */
#include "actors.h"

#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NO_BOUND UINT_MAX

struct segment template_segment;
/* The intent's plain fields; the retry table, and the extents behind it. */
static struct range plain[2] = {{640, 704}, {0, 0}};

#define PRODUCER(name, ...)                                                                      \
    static void name(void) {                                                                     \
        static const enum way ways[] = {__VA_ARGS__};                                            \
        produce(ways, sizeof ways / sizeof ways[0]);                                             \
    }
PRODUCER(puts_one, PUT)
PRODUCER(puts_two, PUT, PUT)
PRODUCER(puts_now_and_then, PUT, IDLE, PUT)
PRODUCER(puts_three, PUT, PUT, PUT)
PRODUCER(puts_five, PUT, PUT, PUT, PUT, PUT)
PRODUCER(reserves_two, RESERVE, RESERVE)
PRODUCER(aborts_and_reserves, ABORT, RESERVE)
PRODUCER(puts_large, JUMBO, JUMBO)
PRODUCER(fills_four, WHOLE, WHOLE, WHOLE, WHOLE)

ROLE(puts_first, put_groups(0))
ROLE(puts_second, put_groups(1))
ROLE(offers_groups, offer_groups())
ROLE(works_on_groups, work_on_groups())
ROLE(delivers_pairs, collect(2, 3, DELIVERS))
ROLE(delivers_answers, collect(2, 6, DELIVERS))

ROLE(collects_from_one, collect(1, 1, PLAIN))
ROLE(collects_pairs_from_one, collect(2, 1, PLAIN))
ROLE(collects_from_two, collect(1, 3, PLAIN))
ROLE(collects_pairs_from_two, collect(2, 3, PLAIN))
ROLE(sweeps_over_two, collect(1, 3, SWEEPS))
ROLE(moves_from_one, collect(2, 1, MOVES))
ROLE(keeps_from_one, collect(1, 1, KEEPS))

ROLE(asks_two, request_one(ASKS_ONCE, 3))
ROLE(asks_two_again, request_one(ASKS_AGAIN, 3))
ROLE(asks_one, request_one(ASKS_ONCE, 1))

ROLE(answers_one, take_request(ANSWERS, 4))
ROLE(gives_back, take_request(GIVES_BACK, 4))
ROLE(answers_either, take_request(ANSWERS, 12))
ROLE(answers_beside, take_request(ANSWERS, 2))

ROLE(offers_prompt, offer_prompt())
ROLE(works_on_prompts, work_on_prompts(1))

ROLE(scribbles_text, scribble(A_TEXT))
ROLE(scribbles_number, scribble(A_NUMBER))
ROLE(scribbles_claim, scribble(A_CLAIM))
ROLE(scribbles_busy, scribble(A_BUSY_CLAIM))

/* Name, subject; scripts; mortal processes by bit, deaths, preemptions, slots of producers, extents,
 * groups ahead. */
static const struct scenario scenarios[] = {
    {"put", "one producer that puts now and then",
     {puts_now_and_then, collects_from_one}, 3, 1, NO_BOUND, 1, 4, 0},
    {"wrap", "one lane through two extents, over and over",
     {puts_five, collects_from_one}, 3, 1, NO_BOUND, 1, 3, 0},
    {"tight", "one extent for a lane that needs two",
     {puts_five, collects_from_one}, 3, 1, NO_BOUND, 1, 2, 0},
    {"reserve", "reservations that end in another order",
     {produce_interleaved, collects_from_one}, 3, 1, NO_BOUND, 1, 3, 0},
    {"abort", "a reservation that is aborted",
     {aborts_and_reserves, collects_from_one}, 3, 1, NO_BOUND, 1, 3, 0},
    {"two", "two producers, groups of two",
     {puts_two, reserves_two, collects_pairs_from_two}, 7, 1, 2, 2, 4, 0},
    {"full", "two producers wait for two extents",
     {puts_three, puts_three, collects_from_two}, 3, 1, 2, 2, 3, 0},
    {"reap", "a slot that is taken over twice while the collector sweeps",
     {puts_one, reserves_two, sweeps_over_two}, 3, 2, 2, 1, 4, 0},
    {"successor", "a collector takes over from one that died, twice",
     {puts_three, collects_pairs_from_one, collects_from_one}, 7, 2, 1, 1, 3, 0},
    {"move", "stragglers are moved, by collectors that die",
     {puts_three, moves_from_one, collects_from_one}, 7, 2, 1, 1, 5, 0},
    {"keep", "a collector that keeps stragglers, and its successor",
     {fills_four, keeps_from_one, collects_from_one}, 7, 1, 1, 1, 6, 0},
    {"large", "runs of two extents, leased and freed",
     {puts_large, puts_two, collects_from_two}, 7, 1, 1, 2, 8, 0},
    {"retry", "two producers answer a retry request, and again after its time",
     {answers_one, answers_one, asks_two_again}, 7, 2, NO_BOUND, 2, 2, 0},
    {"leaving", "a producer gives back the request that it has claimed",
     {gives_back, answers_one, asks_two_again}, 7, 2, NO_BOUND, 2, 2, 0},
    {"inherit", "a collector takes over the requests of one that died",
     {answers_either, answers_either, asks_two, asks_two}, 15, 2, 1, 2, 2, 0},
    {"prompts", "a feeder offers a group of two, and two workers answer it",
     {offers_prompt, works_on_prompts, works_on_prompts}, 7, 2, 2, 2, 4, 0},
    {"ahead", "two producers put two groups of two, one group ahead",
     {puts_first, puts_second, delivers_pairs}, 0, 0, 3, 2, 6, 1},
    {"turns", "two workers make two offered groups of two, one group ahead",
     {offers_groups, works_on_groups, works_on_groups, delivers_answers}, 0, 0, 2, 2, 6, 1},
    {"text", "a request is scribbled over",
     {answers_beside, asks_one, scribbles_text}, 3, 1, NO_BOUND, 1, 2, 0},
    {"number", "its number is scribbled over",
     {answers_beside, asks_one, scribbles_number}, 3, 1, NO_BOUND, 1, 2, 0},
    {"claim", "its claim is scribbled over",
     {answers_beside, asks_one, scribbles_claim}, 3, 1, NO_BOUND, 1, 2, 0},
    {"busy", "its claim says that it is being changed",
     {answers_beside, asks_one, scribbles_busy}, 3, 1, NO_BOUND, 1, 2, 0},
    {.name = NULL},
};

static uint32_t prepare(const struct scenario *scenario) {
    struct segment_geometry plan;
    int fd = memfd_create("shmbus-explore", MFD_CLOEXEC);
    bool planned = segment_plan((uint64_t)scenario->extents * SHMBUS_PAGE, scenario->slots,
                                SHMBUS_PAGE, &plan);
    plan.max_lead = scenario->max_lead;
    if (fd < 0 || !planned || plan.segment_bytes > MEMORY_BYTES ||
        segment_create(&template_segment, fd, &plan) != SHARED_OK) {
        engine_fail("no segment can be made");
    }
    close(template_segment.fd);
    memcpy(world.memory, template_segment.base, plan.segment_bytes);
    plain[1].from = (uint32_t)((uint8_t *)template_segment.retries - template_segment.base);
    plain[1].to = (uint32_t)plan.segment_bytes;
    return plain[1].to;
}

static unsigned lock_place(int64_t byte) {
    return byte == SHMBUS_LOCK_COLLECTOR ? COLLECTOR_LOCK
           : byte == SHMBUS_LOCK_FEEDER  ? FEEDER_LOCK
                                         : (unsigned)(byte - SHMBUS_LOCK_SLOT);
}

/* No living collector frees space. */
static bool may_give_up(void) {
    return world.control.deaths > 0 && world.control.exclusive[COLLECTOR_LOCK] == 0;
}

/* Everything but a retry entry. */
static bool is_one_copy(uint32_t offset) {
    return offset < plain[1].from ||
           offset >= plain[1].from + SHMBUS_RETRY_ENTRIES * sizeof(struct retry_entry);
}

const struct subject subject = {
    .scenarios = scenarios,
    .prepare = prepare,
    .lock_place = lock_place,
    .is_owed = ghost_is_owed,
    .audit = audit_script,
    .plain = plain,
    .may_give_up = may_give_up,
    .is_one_copy = is_one_copy,
    .written = ghost_written,
    .arrived = ghost_arrived,
};
