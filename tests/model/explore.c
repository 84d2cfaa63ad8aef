/* Every interleaving of a subject's processes over its code that ships, with a death at every step.
 *
 * usage: explore [--deep] [--scenario NAME] [--strong | --weak] [--states N] [--preemptions N]
 *                [--deaths N] [--delays N] [--expect-violation]
 *
 * The strong model interleaves; the weak one, of a subject with plain stores to look at, lets stores
 * arrive late too. A subject without them has late stores in its only model. The short form bounds
 * preemptions, deaths and late stores to one or none; the deep one takes what each scenario names.
 *
 * Exit status 0: every invariant holds in every explored state (or an expected violation was
 * found); 1: a violation, with the steps on its way; 2: usage. Each line reports the extent of the search:
 * "complete" means every state within the bounds. */
#include "model.h"

#include <limits.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NO_BOUND UINT_MAX
#define SHORT_STATES UINT64_C(400000)
#define DEEP_STATES UINT64_C(30000000)

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
                             .delays = weak || subject.plain == NULL,
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
    for (const struct scenario *each = subject.scenarios; each->name != NULL; each++) {
        if (options->only != NULL && strcmp(options->only, each->name) != 0) {
            continue;
        }
        any = true;
        if (!options->weak) {
            explore_one(each, options, false);
        }
        if (!options->strong && subject.plain != NULL) {
            explore_one(each, options, true);
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
