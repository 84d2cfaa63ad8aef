/* Common parts of both explorers: coroutines, snapshots and the table of known states.
 *
 * An engine.c includes this file behind its model (`world`, `running`, `bounds`, `states_seen`) and
 * its `stacks`, and defines TABLE_BITS and run_script(). */
#ifndef SHMBUS_MODEL_COROUTINES_H
#define SHMBUS_MODEL_COROUTINES_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { STACK_MARGIN_BYTES = 256 /* below the yielding frame */ };

static jmp_buf scheduler_at;
static ucontext_t first_context;
static uint64_t *table;
static bool at_bound;
static uint8_t *saved; /* stacked snapshots of the runs under way */
static size_t saved_room, saved_used;

static void run_script(void);

/* Runs a process up to its next shared step. */
static void switch_to(int process) {
    struct process *p = &world.processes[process];
    running = process;
    if (_setjmp(scheduler_at) == 0) {
        if (p->started) {
            _longjmp(p->at, 1);
        }
        p->started = true;
        getcontext(&first_context);
        first_context.uc_stack.ss_sp = stacks[process];
        first_context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&first_context, run_script, 0);
        setcontext(&first_context);
    }
}

static void push(const void *from, size_t bytes) {
    if (saved_used + bytes > saved_room) {
        saved_room = saved_room ? saved_room * 2 : 64 << 20;
        saved = realloc(saved, saved_room);
        if (saved == NULL) {
            engine_fail("no memory for snapshots");
        }
    }
    memcpy(saved + saved_used, from, bytes);
    saved_used += bytes;
}

static void pop(void *to, size_t bytes) {
    saved_used -= bytes;
    memcpy(to, saved + saved_used, bytes);
}

static size_t stack_used(int process) {
    const struct process *p = &world.processes[process];
    return p->started ? (size_t)(stacks[process] + STACK_BYTES - p->lowest) : 0;
}

/* False for a known state. */
static bool enter(uint64_t hash) {
    uint64_t mask = (UINT64_C(1) << TABLE_BITS) - 1;
    uint64_t at = (hash >> 1) & mask;
    for (; table[at] != 0; at = (at + 1) & mask) {
        if (table[at] == hash) {
            return false;
        }
    }
    if (states_seen >= bounds.states || states_seen > mask / 8 * 7) {
        at_bound = true;
        return false;
    }
    table[at] = hash;
    states_seen++;
    return true;
}

static void forget_states(void) {
    saved_used = 0;
    at_bound = false;
    free(table);
    table = calloc(UINT64_C(1) << TABLE_BITS, sizeof *table);
    if (table == NULL) {
        fprintf(stderr, "no memory for %u million states\n", 1u << (TABLE_BITS - 20));
        exit(2); /* no violation (1) */
    }
}

#endif
