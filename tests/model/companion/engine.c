/* Processes as coroutines, and a search over every possible continuation.
 *
 * A process runs up to its next shared step and stops in front of it. The search tries each
 * process's next step, late stores, and each death, depth first, and skips known states. The
 * history of observations stands for a process's knowledge.
 *
 * Invariant: visit() returns with the world as at its call. */
#include "companion.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_DEPTH = 4000,
    MAX_TIMEOUTS = 30, /* of a run: more are no progress */
    TABLE_BITS = 24,
    TRACE_LINES = 70,
};

struct world world;
static alignas(64) uint8_t stacks[PROCESSES][STACK_BYTES];
int running = -1;
struct bounds bounds;
uint64_t states_seen, runs_ended;

#include "coroutines.h"

static const struct scenario *scenario;
static struct choice {
    int8_t process;
    uint8_t variant;
    const char *where;
} path[MAX_DEPTH];
static unsigned depth;

static void run_script(void) {
    scenario->scripts[running]();
    memory_drain(running);
    world.processes[running].state = P_DONE;
    _longjmp(scheduler_at, 1);
}

void engine_yield(const char *where, bool is_store) {
    struct process *p = &world.processes[running];
    p->where = where;
    p->is_store = is_store;
    p->lowest = (uint8_t *)__builtin_frame_address(0) - STACK_MARGIN_BYTES;
    if (_setjmp(p->at) == 0) {
        _longjmp(scheduler_at, 1);
    }
}

void engine_pause(void) {
    engine_yield("(idles)", false);
    memory_drain(running);
    world.processes[running].state = P_BLOCKED;
    world.processes[running].futex = NOWHERE;
    engine_yield("(waits for its turn)", false);
}

void engine_observe(uint64_t value) {
    uint64_t *history = &world.processes[running].history;
    *history = (*history ^ value) * UINT64_C(0x9E3779B97F4A7C15) + (*history >> 29);
}

static void resume(int process) {
    switch_to(process);
    if (world.processes[process].state == P_DONE) {
        memory_release_locks(process);
    }
    /* A step is a part of the knowledge: the same values may appear elsewhere. */
    for (const char *at = world.processes[process].where; at != NULL && *at != '\0'; at++) {
        engine_observe((uint64_t)*at);
    }
    running = -1;
}

/* ---- snapshots ---- */

static void save(int process) {
    size_t stack = stack_used(process);
    push(stacks[process] + STACK_BYTES - stack, stack);
    push(&world, sizeof world);
}

static void restore(int process) {
    pop(&world, sizeof world);
    size_t stack = stack_used(process);
    pop(stacks[process] + STACK_BYTES - stack, stack);
}

/* ---- the search ---- */

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 32);
}

static uint64_t hash_world(void) {
    uint64_t hash = memory_hash();
    const uint8_t *control = (const uint8_t *)&world.control;
    for (size_t i = 0; i < sizeof world.control; i++) {
        hash = mix(hash, control[i]);
    }
    for (int i = 0; i < PROCESSES; i++) {
        const struct process *p = &world.processes[i];
        bool lives = p->state == P_READY || p->state == P_BLOCKED;
        hash = mix(hash, lives ? p->history : 0);
        hash = mix(hash, (uint64_t)p->state | (uint64_t)p->started << 8 |
                             (uint64_t)p->futex << 16);
        for (uint32_t k = 0; k < p->late_count; k++) {
            hash = mix(mix(hash, p->late[k].offset), p->late[k].value);
        }
    }
    return hash | 1;
}

static unsigned list_choices(struct choice *choices) {
    const struct control *control = &world.control;
    unsigned n = 0;
    bool going = control->current >= 0 && world.processes[control->current].state == P_READY;
    for (int i = 0; i < PROCESSES; i++) {
        const struct process *p = &world.processes[i];
        bool preempts = going && i != control->current;
        if (p->state != P_READY || (preempts && control->preemptions >= bounds.preemptions)) {
            continue;
        }
        choices[n++] = (struct choice){(int8_t)i, V_RUN, p->where};
        if (p->started && p->is_store && control->delays < bounds.delays) {
            choices[n++] = (struct choice){(int8_t)i, V_DELAY_STORE, p->where};
        }
    }
    for (int i = 0; n == 0 && i < PROCESSES; i++) {
        if (world.processes[i].state == P_BLOCKED) {
            choices[n++] = (struct choice){(int8_t)i, V_TIMEOUT, world.processes[i].where};
        }
    }
    for (int i = 0; i < PROCESSES && control->deaths < bounds.deaths; i++) {
        const struct process *p = &world.processes[i];
        bool lives = p->state == P_READY || p->state == P_BLOCKED;
        if ((scenario->mortal >> i & 1) != 0 && p->started && lives) {
            choices[n++] = (struct choice){(int8_t)i, V_KILL, p->where};
        }
    }
    return n;
}

static void apply(const struct choice *choice) {
    struct control *control = &world.control;
    struct process *p = &world.processes[choice->process];
    path[depth] = *choice;
    if (choice->variant == V_KILL) {
        /* Its executed stores arrive; then the kernel drops its locks. */
        memory_drain(choice->process);
        memory_release_locks(choice->process);
        p->state = P_DEAD;
        control->deaths++;
        return;
    }
    if (choice->variant == V_TIMEOUT) {
        /* Everybody sleeps: an owed sleeper was not woken. */
        for (int i = 0; i < PROCESSES && control->deaths == 0; i++) {
            const struct process *asleep = &world.processes[i];
            if (asleep->state == P_BLOCKED && asleep->futex != NOWHERE && scripts_is_owed(i)) {
                engine_fail("P%d sleeps, though nobody died and there is work for it: a lost wake-up",
                            i);
            }
        }
        if (++control->timeouts > MAX_TIMEOUTS) {
            engine_fail("no progress after %d timeouts", MAX_TIMEOUTS);
        }
        p->state = P_READY;
        p->wait_result = 1;
        return;
    }
    if (control->current != choice->process) {
        bool preempts =
            control->current >= 0 && world.processes[control->current].state == P_READY;
        control->preemptions = (uint8_t)(control->preemptions + preempts);
        control->current = choice->process;
    }
    control->delays = (uint8_t)(control->delays + (choice->variant == V_DELAY_STORE));
    p->variant = (enum variant)choice->variant;
    resume(choice->process);
}

/* Outside of visit(), with as many frames as a run's steps. */
__attribute__((noinline)) static void audit(void) {
    struct world before = world;
    for (unsigned i = 0; i < LOCKS; i++) {
        if (world.control.exclusive[i] != 0 || world.control.shared[i] != 0) {
            engine_fail("lock %u is held by nobody alive", i);
        }
    }
    scripts_audit();
    world = before;
    runs_ended++;
}

static void visit(void) {
    if (!enter(hash_world())) {
        return;
    }
    if (depth + 1 >= MAX_DEPTH) {
        engine_fail("a run of %d steps: no progress", MAX_DEPTH);
    }
    struct choice choices[PROCESSES * 4];
    unsigned n = list_choices(choices);
    if (n == 0) {
        audit();
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        int process = choices[i].process;
        save(process);
        apply(&choices[i]);
        depth++;
        visit();
        depth--;
        restore(process);
    }
}

bool engine_search(const struct scenario *which) {
    scenario = which;
    depth = 0;
    states_seen = runs_ended = 0;
    forget_states();
    memset(&world, 0, sizeof world);
    world.control.current = -1;
    for (int i = 0; i < PROCESSES; i++) {
        world.processes[i].state = which->scripts[i] == NULL ? P_UNUSED : P_READY;
        world.processes[i].history = 1;
    }
    scripts_prepare(which);
    visit();
    return !at_bound;
}

void engine_fail(const char *format, ...) {
    static const char *const variants[] = {"", "(late)", "DIES", "times out"};
    va_list arguments;
    fprintf(stderr, "violation in scenario '%s': ", scenario->name);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n  after %u steps; the last of them:\n", depth + 1);
    for (unsigned i = depth > TRACE_LINES ? depth - TRACE_LINES : 0; i <= depth; i++) {
        const char *where = path[i].where == NULL ? "(begins)" : path[i].where;
        const char *slash = strrchr(where, '/');
        fprintf(stderr, "  %4u  P%d %-28s %s\n", i, path[i].process, slash ? slash + 1 : where,
                variants[path[i].variant]);
    }
    exit(1);
}
