/* Every interleaving of a few processes over the ring that ships, with a death at every step.
 *
 * usage: explore [--deep] [--scenario NAME] [--strong | --weak] [--states N] [--preemptions N]
 *                [--deaths N] [--delays N] [--expect-violation]
 *
 * The strong model interleaves; the weak one lets stores arrive late too. The short form bounds
 * both to one preemption and one death, or none; the deep one takes what each scenario names.
 *
 * Exit status 0: every invariant holds in every explored state (or an expected violation was
 * found); 1: a violation, with the steps on its way; 2: usage. Each line reports the extent of the search:
 * "complete" means every state within the bounds. */
#include "actors.h"

#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NO_BOUND UINT_MAX
#define SHORT_STATES UINT64_C(400000)
#define DEEP_STATES UINT64_C(30000000)

struct segment template_segment;
uint32_t segment_bytes;

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

/* A process of a scenario with a single call. */
#define ROLE(name, call)                                                                         \
    static void name(void) {                                                                     \
        call;                                                                                    \
    }
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

/* Name, subject; scripts; extents, slots of producers, mortal processes by bit, deaths, preemptions,
 * groups ahead. */
static const struct scenario scenarios[] = {
    {"put", "one producer that puts now and then",
     {puts_now_and_then, collects_from_one}, 4, 1, 3, 1, NO_BOUND, 0},
    {"wrap", "one lane through two extents, over and over",
     {puts_five, collects_from_one}, 3, 1, 3, 1, NO_BOUND, 0},
    {"tight", "one extent for a lane that needs two",
     {puts_five, collects_from_one}, 2, 1, 3, 1, NO_BOUND, 0},
    {"reserve", "reservations that end in another order",
     {produce_interleaved, collects_from_one}, 3, 1, 3, 1, NO_BOUND, 0},
    {"abort", "a reservation that is aborted",
     {aborts_and_reserves, collects_from_one}, 3, 1, 3, 1, NO_BOUND, 0},
    {"two", "two producers, groups of two",
     {puts_two, reserves_two, collects_pairs_from_two}, 4, 2, 7, 1, 2, 0},
    {"full", "two producers wait for two extents",
     {puts_three, puts_three, collects_from_two}, 3, 2, 3, 1, 2, 0},
    {"reap", "a slot that is taken over twice while the collector sweeps",
     {puts_one, reserves_two, sweeps_over_two}, 4, 1, 3, 2, 2, 0},
    {"successor", "a collector takes over from one that died, twice",
     {puts_three, collects_pairs_from_one, collects_from_one}, 3, 1, 7, 2, 1, 0},
    {"move", "stragglers are moved, by collectors that die",
     {puts_three, moves_from_one, collects_from_one}, 5, 1, 7, 2, 1, 0},
    {"keep", "a collector that keeps stragglers, and its successor",
     {fills_four, keeps_from_one, collects_from_one}, 6, 1, 7, 1, 1, 0},
    {"large", "runs of two extents, leased and freed",
     {puts_large, puts_two, collects_from_two}, 8, 2, 7, 1, 1, 0},
    {"retry", "two producers answer a retry request, and again after its time",
     {answers_one, answers_one, asks_two_again}, 2, 2, 7, 2, NO_BOUND, 0},
    {"leaving", "a producer gives back the request that it has claimed",
     {gives_back, answers_one, asks_two_again}, 2, 2, 7, 2, NO_BOUND, 0},
    {"inherit", "a collector takes over the requests of one that died",
     {answers_either, answers_either, asks_two, asks_two}, 2, 2, 15, 2, 1, 0},
    {"prompts", "a feeder offers a group of two, and two workers answer it",
     {offers_prompt, works_on_prompts, works_on_prompts}, 4, 2, 7, 2, 2, 0},
    {"ahead", "two producers put two groups of two, one group ahead",
     {puts_first, puts_second, delivers_pairs}, 6, 2, 0, 0, 3, 1},
    {"turns", "two workers make two offered groups of two, one group ahead",
     {offers_groups, works_on_groups, works_on_groups, delivers_answers}, 6, 2, 0, 0, 2, 1},
    {"text", "a request is scribbled over",
     {answers_beside, asks_one, scribbles_text}, 2, 1, 3, 1, NO_BOUND, 0},
    {"number", "its number is scribbled over",
     {answers_beside, asks_one, scribbles_number}, 2, 1, 3, 1, NO_BOUND, 0},
    {"claim", "its claim is scribbled over",
     {answers_beside, asks_one, scribbles_claim}, 2, 1, 3, 1, NO_BOUND, 0},
    {"busy", "its claim says that it is being changed",
     {answers_beside, asks_one, scribbles_busy}, 2, 1, 3, 1, NO_BOUND, 0},
};
#define SCENARIOS (sizeof scenarios / sizeof scenarios[0])

static void make_template(const struct scenario *scenario) {
    struct segment_geometry plan;
    int fd = memfd_create("shmbus-explore", MFD_CLOEXEC);
    bool planned = segment_plan((uint64_t)scenario->extents * SHMBUS_PAGE, scenario->producers,
                                SHMBUS_PAGE, &plan);
    plan.max_lead = scenario->max_lead;
    if (fd < 0 || !planned || plan.segment_bytes > SEGMENT_ROOM ||
        segment_create(&template_segment, fd, &plan) != SHARED_OK) {
        fprintf(stderr, "scenario '%s': no segment can be made for it\n", scenario->name);
        exit(2);
    }
    close(template_segment.fd);
    segment_bytes = (uint32_t)plan.segment_bytes;
}

void engine_prepare(const struct scenario *scenario) {
    memset(&world, 0, sizeof world);
    make_template(scenario);
    memcpy(world.memory, template_segment.base, segment_bytes);
    memcpy(world.shadow, template_segment.base, segment_bytes);
    world.control.clock_ns = UINT64_C(1000000000);
    world.control.current = -1;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        struct process *p = &world.processes[i];
        memcpy(world.view[i], template_segment.base, segment_bytes);
        memcpy(world.known[i], template_segment.base, segment_bytes);
        p->offset = NOWHERE;
        p->mortal = (scenario->mortal >> i & 1) != 0;
        p->state = i < AUDITOR && scenario->scripts[i] != NULL ? P_READY : P_UNUSED;
    }
}

struct options {
    const char *only;
    bool deep, strong, weak;
    uint64_t states;
    int preemptions, deaths, delays; /* -1: the scenario's own */
};

static void explore_one(const struct scenario *scenario, const struct options *options, bool weak) {
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    bounds = (struct bounds){.preemptions = scenario->preemptions,
                             .deaths = scenario->deaths,
                             .delays = weak ? 1 : 0,
                             .states = options->states,
                             .weak = weak};
    if (!options->deep) {
        bounds.preemptions = 1;
        bounds.deaths = weak ? 0 : 1;
    }
    if (options->preemptions >= 0) {
        bounds.preemptions = (unsigned)options->preemptions;
    }
    if (options->deaths >= 0) {
        bounds.deaths = (unsigned)options->deaths;
    }
    if (options->delays >= 0) {
        bounds.delays = (unsigned)options->delays;
    }
    bool complete = engine_search(scenario);
    clock_gettime(CLOCK_MONOTONIC, &to);
    double seconds = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) / 1e9;
    char preemptions[16] = "any";
    if (bounds.preemptions != NO_BOUND) {
        snprintf(preemptions, sizeof preemptions, "%u", bounds.preemptions);
    }
    printf("%-10s %-6s  preemptions %-3s deaths %u delays %u  %9llu states %10llu steps %7llu ends "
           "%8llu kills  %s, %.1f s\n",
           scenario->name, weak ? "weak" : "strong", preemptions, bounds.deaths, bounds.delays,
           (unsigned long long)states_seen, (unsigned long long)steps_taken,
           (unsigned long long)runs_ended, (unsigned long long)deaths_tried,
           complete ? "complete" : "at its bound of states", seconds);
    fflush(stdout);
}

static void explore_all(const struct options *options) {
    bool any = false;
    for (size_t i = 0; i < SCENARIOS; i++) {
        if (options->only != NULL && strcmp(options->only, scenarios[i].name) != 0) {
            continue;
        }
        any = true;
        if (!options->weak) {
            explore_one(&scenarios[i], options, false);
        }
        if (!options->strong) {
            explore_one(&scenarios[i], options, true);
        }
    }
    if (!any) {
        fprintf(stderr, "there is no scenario '%s'\n", options->only);
        exit(2);
    }
}

/* In a child, since a violation ends the process. */
static int find_violation(const struct options *options) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        explore_all(options);
        exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) {
        return 2;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 1) {
        puts("found, as expected");
        return 0;
    }
    fprintf(stderr, "no violation was found, though one was expected\n");
    return 1;
}

int main(int argc, char **argv) {
    struct options options = {
        .states = SHORT_STATES, .preemptions = -1, .deaths = -1, .delays = -1};
    bool expected = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--deep") == 0) {
            options.deep = true;
            options.states = DEEP_STATES;
        } else if (strcmp(argv[i], "--strong") == 0) {
            options.strong = true;
        } else if (strcmp(argv[i], "--weak") == 0) {
            options.weak = true;
        } else if (strcmp(argv[i], "--expect-violation") == 0) {
            expected = true;
        } else if (strcmp(argv[i], "--scenario") == 0 && i + 1 < argc) {
            options.only = argv[++i];
        } else if (strcmp(argv[i], "--preemptions") == 0 && i + 1 < argc) {
            options.preemptions = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--deaths") == 0 && i + 1 < argc) {
            options.deaths = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--delays") == 0 && i + 1 < argc) {
            options.delays = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--states") == 0 && i + 1 < argc) {
            options.states = strtoull(argv[++i], NULL, 10);
        } else {
            fprintf(stderr, "usage: %s [--deep] [--scenario NAME] [--strong | --weak] [--states N] "
                            "[--preemptions N] [--deaths N] [--delays N] [--expect-violation]\n",
                    argv[0]);
            return 2;
        }
    }
    if (expected) {
        return find_violation(&options);
    }
    explore_all(&options);
    puts("explore: no violation");
    return 0;
}
