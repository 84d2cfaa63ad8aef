/* Processes as coroutines, and a search over every possible continuation.
 *
 * A process runs up to its next shared access and stops in front of it. From there the search tries
 * each process's next step and each death, depth first, and skips known states. The history of
 * observations stands for a process's knowledge: runs that differ only in the order of independent
 * steps meet in the same state.
 *
 * Invariant: visit() returns with the world as at its call. */
#include "model.h"

#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

enum {
    MAX_DEPTH = 6000,       /* steps of a run; a longer run makes no progress */
    MAX_TIMEOUTS = 24,      /* of a run */
    TABLE_BITS = 26,        /* of the table of states: 512 MiB, allocated as it fills */
    TRACE_LINES = 60,
};
#define TIMEOUT_CLOCK_NS UINT64_C(2000000000)

struct world world;
alignas(64) uint8_t stacks[MAX_PROCESSES][STACK_BYTES];
int running = -1;
struct bounds bounds;
uint64_t states_seen, steps_taken, runs_ended, deaths_tried;

#include "coroutines.h"

static const struct scenario *scenario;

struct choice {
    int8_t process;
    uint8_t variant;
};
static struct step {
    struct choice choice;
    enum operation op;
    uint32_t offset;
    const char *where;
} path[MAX_DEPTH];
static unsigned depth;

/* ---- coroutines ---- */

static void run_script(void) {
    void (*script)(void) = running == AUDITOR ? audit_script : scenario->scripts[running];
    script();
    memory_flush(running);
    world.processes[running].state = P_DONE;
    _longjmp(scheduler_at, 1);
}

void engine_yield(enum operation op, uint32_t offset, int order, const char *where) {
    struct process *p = &world.processes[running];
    p->op = op;
    p->offset = offset;
    p->order = order;
    p->where = where;
    p->lowest = (uint8_t *)__builtin_frame_address(0) - STACK_MARGIN_BYTES;
    if (_setjmp(p->at) == 0) {
        _longjmp(scheduler_at, 1);
    }
}

static void release_locks(int process) {
    for (unsigned i = 0; i < sizeof world.control.lock_owner; i++) {
        if (world.control.lock_owner[i] == process + 1) {
            world.control.lock_owner[i] = 0;
        }
    }
}

static void resume(int process) {
    switch_to(process);
    memory_settle(process);
    if (world.processes[process].state == P_DONE) {
        release_locks(process);
        world.control.ghost.finished |= (uint8_t)(1u << process);
    }
    running = -1;
}

void engine_observe(uint64_t value) {
    struct process *p = &world.processes[running];
    p->history = mix_hash(p->history, value);
}

void engine_checkpoint(void) {
    struct process *p = &world.processes[running];
    p->history = hash_bytes(1, world.heap[running], p->heap_used);
}

void engine_pause(void) {
    engine_yield(OP_FENCE, NOWHERE, memory_order_relaxed, "(idles)");
    struct process *p = &world.processes[running];
    /* No store waits for as long as this. */
    memory_flush(running);
    engine_checkpoint();
    p->state = P_BLOCKED;
    p->futex = NOWHERE;
    p->timed = p->patient = true;
    engine_yield(OP_WAIT, NOWHERE, memory_order_seq_cst, "(waits for its turn)");
    world.processes[running].patient = false;
}

/* ---- snapshots ---- */

/* Saves everything a step of this process can change. */
static void save(int process) {
    size_t stack = stack_used(process);
    uint32_t heap = world.processes[process].heap_used;
    push(stacks[process] + STACK_BYTES - stack, stack);
    push(world.heap[process], heap);
    push(world.memory, segment_bytes);
    if (bounds.weak) {
        push(world.view[process], segment_bytes);
        push(world.known[process], segment_bytes);
    }
    push(world.processes, sizeof world.processes);
    push(&world.control, sizeof world.control);
}

static void restore(int process) {
    uint32_t heap_before = world.processes[process].heap_used;
    pop(&world.control, sizeof world.control);
    pop(world.processes, sizeof world.processes);
    if (bounds.weak) {
        pop(world.known[process], segment_bytes);
        pop(world.view[process], segment_bytes);
    }
    pop(world.memory, segment_bytes);
    memcpy(world.shadow, world.memory, segment_bytes);
    uint32_t heap = world.processes[process].heap_used;
    pop(world.heap[process], heap);
    if (heap_before > heap) {
        memset(world.heap[process] + heap, 0, heap_before - heap);
    }
    size_t stack = stack_used(process);
    pop(stacks[process] + STACK_BYTES - stack, stack);
}

/* ---- states ---- */

static uint64_t hash_world(void) {
    struct control control = world.control;
    if (bounds.preemptions == UINT_MAX) {
        control.current = 0;
        control.preemptions = 0;
    }
    uint64_t hash = hash_bytes(7, &control, sizeof control);
    for (int i = 0; i < MAX_PROCESSES; i++) {
        const struct process *p = &world.processes[i];
        if (p->state == P_UNUSED) {
            continue;
        }
        hash = mix_hash(hash, p->state == P_DONE || p->state == P_DEAD ? 0 : p->history);
        hash = mix_hash(hash, (uint64_t)p->state | (uint64_t)p->op << 8 |
                                  (uint64_t)p->started << 16 |
                                  (uint64_t)p->wait_result << 24);
        if (bounds.weak && (p->state == P_READY || p->state == P_BLOCKED)) {
            hash = hash_bytes(hash, p->buffered, p->buffered_count * sizeof p->buffered[0]);
            hash = memory_hash_view(hash, i);
        }
    }
    return hash | 1;
}

/* ---- the search ---- */

static unsigned add(struct choice *choices, unsigned n, int process, enum variant variant) {
    choices[n] = (struct choice){(int8_t)process, (uint8_t)variant};
    return n + 1;
}

/* Variants of a process's next operation under weak ordering. */
static unsigned add_variants(struct choice *choices, unsigned n, int process) {
    const struct process *p = &world.processes[process];
    n = add(choices, n, process, V_PLAIN);
    if (!bounds.weak || !p->started) {
        return n;
    }
    if (p->buffered_count > 0) {
        n = add(choices, n, process, V_FLUSH_FIRST);
    }
    if (world.control.delays < bounds.delays) {
        if (memory_store_is_plain_relaxed(p) && memory_has_plain_stores(process)) {
            n = add(choices, n, process, V_KEEP_PLAIN_STORES);
        }
        if (p->op == OP_STORE && p->buffered_count < BUFFER_ENTRIES) {
            n = add(choices, n, process, V_BUFFER_STORE);
        }
    }
    if (p->op == OP_COPY && memory_has_plain_stores(process)) {
        n = add(choices, n, process, V_PLAIN_STORES_FIRST);
    }
    return n;
}

static unsigned list_choices(struct choice *choices) {
    const struct control *control = &world.control;
    unsigned n = 0;
    bool going = control->current >= 0 && world.processes[control->current].state == P_READY;
    for (int turn = -1; turn < AUDITOR; turn++) {
        int process = turn < 0 ? control->current : turn;
        if (process < 0 || (turn >= 0 && turn == control->current) ||
            world.processes[process].state != P_READY) {
            continue;
        }
        bool preempts = going && process != control->current;
        if (!preempts || control->preemptions < bounds.preemptions) {
            n = add_variants(choices, n, process);
        }
    }
    if (n == 0) {
        for (int process = 0; process < AUDITOR; process++) {
            const struct process *p = &world.processes[process];
            if (p->state == P_BLOCKED && p->timed) {
                n = add(choices, n, process, V_TIMEOUT);
            }
        }
    }
    for (int process = 0; process < AUDITOR && control->deaths < bounds.deaths; process++) {
        const struct process *p = &world.processes[process];
        if (p->mortal && p->started && (p->state == P_READY || p->state == P_BLOCKED)) {
            n = add(choices, n, process, V_KILL);
        }
    }
    return n;
}

/* Its executed stores arrive; then the kernel drops its locks. */
static void kill_process(int process) {
    memory_flush(process);
    release_locks(process);
    world.processes[process].state = P_DEAD;
    world.control.ghost.finished |= (uint8_t)(1u << process);
    world.control.deaths++;
    world.control.vain = 0;
    deaths_tried++;
}

/* A patient process looks in vain until a change: the same state again. */
static void wake_patient(int process) {
    struct control *control = &world.control;
    if (!ghost_wants_in_vain()) {
        return;
    }
    uint8_t patient = 0;
    for (int i = 0; i < AUDITOR; i++) {
        const struct process *p = &world.processes[i];
        patient |= (uint8_t)((p->state == P_BLOCKED && p->patient) << i);
    }
    if ((patient & ~control->vain) == 0) {
        engine_fail("all have looked in vain, and a request waits for an answer: it is lost");
    }
    control->vain |= (uint8_t)(1u << process);
}

static void apply(const struct choice *choice) {
    struct control *control = &world.control;
    struct process *p = &world.processes[choice->process];
    path[depth] = (struct step){*choice, p->op, p->offset, p->started ? p->where : "(begins)"};
    steps_taken++;
    if (choice->variant == V_KILL) {
        kill_process(choice->process);
        return;
    }
    if (choice->variant == V_TIMEOUT) {
        if (control->deaths == 0 && !p->patient && ghost_is_owed(p->futex)) {
            engine_fail("P%d sleeps, though nobody died and there is work for it: a lost wake-up",
                        choice->process);
        }
        if (p->patient) {
            wake_patient(choice->process);
        } else if (++control->timeouts > MAX_TIMEOUTS) {
            if (control->deaths == 0 || control->lock_owner[MAX_SLOTS] != 0) {
                engine_fail("no progress after %d timeouts", MAX_TIMEOUTS);
            }
            /* No living collector frees space: the user ends the process. */
            kill_process(choice->process);
            return;
        }
        control->clock_ns += p->patient ? 0 : TIMEOUT_CLOCK_NS;
        p->state = P_READY;
        p->wait_result = 1;
        return;
    }
    if (control->current != choice->process) {
        bool preempts = control->current >= 0 &&
                        world.processes[control->current].state == P_READY;
        control->preemptions = (uint8_t)(control->preemptions + preempts);
        control->current = choice->process;
    }
    if (choice->variant == V_KEEP_PLAIN_STORES || choice->variant == V_BUFFER_STORE) {
        control->delays++;
    }
    p->variant = (enum variant)choice->variant;
    uint64_t memory_before = control->memory_hash;
    resume(choice->process);
    if (control->memory_hash != memory_before || p->state == P_DONE) {
        control->vain = 0;
    }
}

static void audit(void) {
    save(AUDITOR);
    world.processes[AUDITOR].state = P_READY;
    unsigned steps = 0;
    while (world.processes[AUDITOR].state == P_READY) {
        world.processes[AUDITOR].variant = V_PLAIN;
        resume(AUDITOR);
        if (++steps > MAX_DEPTH) {
            engine_fail("the audit does not end");
        }
    }
    if (world.processes[AUDITOR].state != P_DONE) {
        engine_fail("the audit sleeps");
    }
    restore(AUDITOR);
    runs_ended++;
}

static void visit(void) {
    if (!enter(hash_world())) {
        return;
    }
    if (depth + 1 >= MAX_DEPTH) {
        engine_fail("a run of %d steps: no progress", MAX_DEPTH);
    }
    struct choice choices[MAX_PROCESSES * 5];
    unsigned n = list_choices(choices);
    bool alive = false;
    for (int i = 0; i < AUDITOR; i++) {
        alive = alive || world.processes[i].state == P_READY ||
                world.processes[i].state == P_BLOCKED;
    }
    if (!alive) {
        audit();
        return;
    }
    if (n == 0) {
        engine_fail("all that live are asleep for good");
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
    states_seen = steps_taken = runs_ended = deaths_tried = 0;
    forget_states();
    engine_prepare(which);
    visit();
    return !at_bound;
}

/* ---- telling ---- */

static const char *base_name(const char *where) {
    const char *slash = strrchr(where, '/');
    return slash ? slash + 1 : where;
}

static void print_step(unsigned i) {
    static const char *const operations[] = {"begin", "load",   "store", "rmw",  "fence",
                                             "lock",  "unlock", "wait",  "wake",  "copy"};
    static const char *const variants[] = {"",        "(earlier plain stores late)",
                                           "(buffered)", "(its buffer first)",
                                           "(earlier plain stores first)"};
    const struct step *step = &path[i];
    if (step->choice.variant == V_KILL) {
        fprintf(stderr, "  %4u  P%d DIES before %s\n", i, step->choice.process,
                base_name(step->where));
    } else if (step->choice.variant == V_TIMEOUT) {
        fprintf(stderr, "  %4u  P%d times out\n", i, step->choice.process);
    } else {
        fprintf(stderr, "  %4u  P%d %-6s %-24s +%-6d %s\n", i, step->choice.process,
                operations[step->op], base_name(step->where),
                step->offset == NOWHERE ? -1 : (int)step->offset, variants[step->choice.variant]);
    }
}

void engine_fail(const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "violation in scenario '%s': ", scenario->name);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n  after %u steps; the last of them:\n", depth + 1);
    const char *all = getenv("SHMBUS_EXPLORE_TRACE");
    unsigned from = all == NULL && depth > TRACE_LINES ? depth - TRACE_LINES : 0;
    for (unsigned i = from; i <= depth; i++) {
        if (path[i].where != NULL) {
            print_step(i);
        }
    }
    exit(1);
}
