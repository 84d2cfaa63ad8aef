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
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <ucontext.h>

enum {
    MAX_DEPTH = 6000,       /* steps of a run; a longer run makes no progress */
    MAX_TIMEOUTS = 30,      /* of a run */
    IDLE_TIMEOUTS = 2,      /* of a run, beside a process that waits for its turn */
    TABLE_BITS = 26,        /* of the table of states: 512 MiB, allocated as it fills */
    TRACE_LINES = 60,
    STACK_MARGIN_BYTES = 256, /* below the yielding frame */
};
#define TIMEOUT_CLOCK_NS UINT64_C(2000000000)

struct world world;
static alignas(64) uint8_t stacks[MAX_PROCESSES][STACK_BYTES];
int running = -1;
struct bounds bounds;
uint32_t memory_bytes;
uint64_t states_seen, steps_taken, runs_ended, deaths_tried;

static jmp_buf scheduler_at;
static ucontext_t first_context;
static uint64_t *table;
static bool at_bound;
static uint8_t *saved; /* stacked snapshots of the runs under way */
static size_t saved_room, saved_used;
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
    void (*script)(void) = running == AUDITOR ? subject.audit : scenario->scripts[running];
    script();
    memory_flush(running);
    world.processes[running].state = P_DONE;
    _longjmp(scheduler_at, 1);
}

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

static void resume(int process) {
    switch_to(process);
    memory_settle(process);
    struct process *p = &world.processes[process];
    if (p->state == P_DONE) {
        memory_release_locks(process);
        world.control.finished |= (uint8_t)(1u << process);
    }
    /* A step is a part of the knowledge: the same values may appear elsewhere. */
    p->history = mix_hash(p->history, (uint64_t)(uintptr_t)p->where);
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

bool engine_is_alive(int process) {
    enum process_state state = world.processes[process].state;
    return state == P_READY || state == P_BLOCKED;
}

void engine_pause(bool patient) {
    engine_yield(OP_FENCE, NOWHERE, memory_order_relaxed, "(idles)");
    struct process *p = &world.processes[running];
    /* No store waits for as long as this. */
    memory_flush(running);
    if (patient) {
        engine_checkpoint();
    }
    p->state = P_BLOCKED;
    p->futex = NOWHERE;
    p->timed = true;
    p->patient = patient;
    engine_yield(OP_WAIT, NOWHERE, memory_order_seq_cst, "(waits for its turn)");
    world.processes[running].patient = false;
}

/* ---- snapshots ---- */

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

/* Saves everything a step of this process can change. */
static void save(int process) {
    size_t stack = stack_used(process);
    uint32_t heap = world.processes[process].heap_used;
    push(stacks[process] + STACK_BYTES - stack, stack);
    push(world.heap[process], heap);
    push(world.memory, memory_bytes);
    if (bounds.weak) {
        push(world.view[process], memory_bytes);
        push(world.known[process], memory_bytes);
    }
    push(world.processes, sizeof world.processes);
    push(&world.control, sizeof world.control);
}

static void restore(int process) {
    uint32_t heap_before = world.processes[process].heap_used;
    pop(&world.control, sizeof world.control);
    pop(world.processes, sizeof world.processes);
    if (bounds.weak) {
        pop(world.known[process], memory_bytes);
        pop(world.view[process], memory_bytes);
    }
    pop(world.memory, memory_bytes);
    memcpy(world.shadow, world.memory, memory_bytes);
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
        hash = hash_bytes(hash, p->buffered, p->buffered_count * sizeof p->buffered[0]);
        if (bounds.weak && engine_is_alive(i)) {
            hash = memory_hash_view(hash, i);
        }
    }
    return hash | 1;
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

/* ---- the search ---- */

static unsigned add(struct choice *choices, unsigned n, int process, enum variant variant) {
    choices[n] = (struct choice){(int8_t)process, (uint8_t)variant};
    return n + 1;
}

/* Variants of a process's next operation under weak ordering. */
static unsigned add_variants(struct choice *choices, unsigned n, int process) {
    const struct process *p = &world.processes[process];
    n = add(choices, n, process, V_PLAIN);
    if (!p->started) {
        return n;
    }
    if (p->buffered_count > 0) {
        n = add(choices, n, process, V_FLUSH_FIRST);
    }
    if (world.control.delays < bounds.delays) {
        if (bounds.weak && memory_store_is_plain_relaxed(p) && memory_has_plain_stores(process)) {
            n = add(choices, n, process, V_KEEP_PLAIN_STORES);
        }
        if (p->op == OP_STORE && p->buffered_count < BUFFER_ENTRIES) {
            n = add(choices, n, process, V_BUFFER_STORE);
        }
    }
    if (bounds.weak && p->op == OP_COPY && memory_has_plain_stores(process)) {
        n = add(choices, n, process, V_PLAIN_STORES_FIRST);
    }
    return n;
}

/* By bit. */
static uint8_t list_patient(void) {
    uint8_t patient = 0;
    for (int i = 0; i < AUDITOR; i++) {
        const struct process *p = &world.processes[i];
        patient |= (uint8_t)((p->state == P_BLOCKED && p->patient) << i);
    }
    return patient;
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
    uint8_t patient = list_patient();
    for (int turn = 0; n == 0 && turn < 2; turn++) {
        for (int process = 0; process < AUDITOR; process++) {
            const struct process *p = &world.processes[process];
            /* Without patience a pause ends after each sleep. */
            bool late = p->futex == NOWHERE && !p->patient;
            bool idle = !p->patient && patient != 0 && control->timeouts >= IDLE_TIMEOUTS;
            if (p->state == P_BLOCKED && p->timed && late == (turn == 1) && !idle) {
                n = add(choices, n, process, V_TIMEOUT);
            }
        }
    }
    for (int process = 0; process < AUDITOR && control->deaths < bounds.deaths; process++) {
        const struct process *p = &world.processes[process];
        if ((scenario->mortal >> process & 1) != 0 && p->started && engine_is_alive(process)) {
            n = add(choices, n, process, V_KILL);
        }
    }
    return n;
}

/* Its executed stores arrive; then the kernel drops its locks. */
static void kill_process(int process) {
    memory_flush(process);
    memory_release_locks(process);
    world.processes[process].state = P_DEAD;
    world.control.finished |= (uint8_t)(1u << process);
    world.control.deaths++;
    world.control.vain = 0;
    deaths_tried++;
}

/* A patient process looks in vain until a change: the same state again. */
static void wake_patient(int process) {
    struct control *control = &world.control;
    if (!subject.is_owed(process)) {
        return;
    }
    if ((list_patient() & ~control->vain) == 0) {
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
        if (control->deaths == 0 && p->futex != NOWHERE && subject.is_owed(choice->process)) {
            engine_fail("P%d sleeps, though nobody died and there is work for it: a lost wake-up",
                        choice->process);
        }
        if (p->patient) {
            wake_patient(choice->process);
        } else if (++control->timeouts > MAX_TIMEOUTS) {
            if (subject.may_give_up == NULL || !subject.may_give_up()) {
                engine_fail("no progress after %d timeouts", MAX_TIMEOUTS);
            }
            /* The user ends the process. */
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
    for (unsigned i = 0; i < LOCKS; i++) {
        if (world.control.exclusive[i] != 0 || world.control.shared[i] != 0) {
            engine_fail("lock %u is held by nobody alive", i);
        }
    }
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
        alive = alive || engine_is_alive(i);
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

static void prepare(void) {
    memset(&world, 0, sizeof world);
    memory_bytes = subject.prepare(scenario);
    memcpy(world.shadow, world.memory, memory_bytes);
    world.control.clock_ns = UINT64_C(1000000000);
    world.control.current = -1;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        struct process *p = &world.processes[i];
        memcpy(world.view[i], world.memory, memory_bytes);
        memcpy(world.known[i], world.memory, memory_bytes);
        p->offset = p->futex = NOWHERE;
        p->state = i < AUDITOR && scenario->scripts[i] != NULL ? P_READY : P_UNUSED;
    }
}

bool engine_search(const struct scenario *which) {
    scenario = which;
    depth = 0;
    states_seen = steps_taken = runs_ended = deaths_tried = 0;
    forget_states();
    prepare();
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
