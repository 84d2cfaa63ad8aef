/* Failpoints of a test build (see failpoints.h); an empty file otherwise. */
#define _GNU_SOURCE
#include "base/failpoints.h"

/* ISO C forbids an empty translation unit. */
typedef int failpoints_are_for_tests;

#ifdef SHMBUS_FAILPOINTS
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char target[64];
static long target_hit;
static int target_signal;
static atomic_long hits;
static atomic_int parsed_in; /* process id; a child parses the variable anew */

static void parse(void) {
    const char *text = getenv("SHMBUS_FAILPOINT");
    const char *hit = text == NULL ? NULL : strchr(text, ':');
    const char *action = hit == NULL ? NULL : strchr(hit + 1, ':');
    target_hit = 0;
    atomic_store(&hits, 0);
    if (action == NULL || (size_t)(hit - text) >= sizeof target) {
        return;
    }
    memset(target, 0, sizeof target);
    memcpy(target, text, (size_t)(hit - text));
    target_hit = strtol(hit + 1, NULL, 10);
    target_signal = strcmp(action + 1, "stop") == 0 ? SIGSTOP : SIGKILL;
}

void failpoint_passed(const char *name) {
    if (atomic_exchange(&parsed_in, getpid()) != getpid()) {
        parse();
    }
    int any = strcmp(target, "any") == 0;
    if (target_hit > 0 && (any || strcmp(name, target) == 0)) {
        long hit = atomic_fetch_add(&hits, 1) + 1;
        if (!any && hit == target_hit) {
            kill(getpid(), target_signal);
        }
        usleep(any && hit % target_hit == 0 ? (useconds_t)(hit * 7919 % 3000) : 0);
    }
}
#endif
