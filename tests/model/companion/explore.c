/* Every interleaving of a subject's processes, with a death at every step. A subject is what goes
 * beside a bus: the slot pool, the channel.
 *
 * usage: explore [--scenario NAME] [--preemptions N] [--deaths N] [--delays N] [--states N]
 *                [--expect-violation]
 *
 * Exit status 0: all invariants hold in all that was explored (or, expected, a violation was found);
 * 1: a violation, with the steps that lead to it; 2: usage. "complete" means every state that the
 * bounds allow. */
#include "companion.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned long number_of(int argc, char **argv, const char *option, unsigned long otherwise) {
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], option) == 0) {
            return strtoul(argv[i + 1], NULL, 10);
        }
    }
    return otherwise;
}

static const char *text_of(int argc, char **argv, const char *option) {
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], option) == 0) {
            return argv[i + 1];
        }
    }
    return NULL;
}

static bool has(int argc, char **argv, const char *option) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], option) == 0) {
            return true;
        }
    }
    return false;
}

static void explore(const struct scenario *scenario) {
    bool complete = engine_search(scenario);
    printf("%-10s %u preemptions, %u deaths, %u late stores: %llu states, %llu ends, %s\n",
           scenario->name, bounds.preemptions, bounds.deaths, bounds.delays,
           (unsigned long long)states_seen, (unsigned long long)runs_ended,
           complete ? "complete" : "ended at its bound");
    fflush(stdout);
}

int main(int argc, char **argv) {
    const char *only = text_of(argc, argv, "--scenario");
    bounds.preemptions = (unsigned)number_of(argc, argv, "--preemptions", 1);
    bounds.deaths = (unsigned)number_of(argc, argv, "--deaths", 1);
    bounds.delays = (unsigned)number_of(argc, argv, "--delays", 1);
    bounds.states = number_of(argc, argv, "--states", 4000000);
    bool found = false, any = false;
    for (const struct scenario *s = scenarios; s->name != NULL; s++) {
        if (only != NULL && strcmp(only, s->name) != 0) {
            continue;
        }
        any = true;
        /* A process each: a violation ends its process. */
        pid_t child = fork();
        if (child == 0) {
            explore(s);
            exit(0);
        }
        int status = 0;
        if (child < 0 || waitpid(child, &status, 0) != child) {
            perror("explore");
            return 2;
        }
        found = found || status != 0;
    }
    if (!any) {
        fprintf(stderr, "explore: no such scenario\n");
        return 2;
    }
    return found == has(argc, argv, "--expect-violation") ? 0 : 1;
}
