/* The explorer of companions of a bus, and of a subject: interfaces of the parts.
 *
 * engine.c   processes as coroutines, choices, snapshots, the search
 * memory.c   loads, stores, futexes and file locks, routed here by tests/model/hooks.h
 * scripts.c  of the subject: steps of its processes, promises, and the scenarios
 * subject.h  of the subject: a process's part (`subject`), and the scripts' mutual knowledge
 *            (`struct ghost`)
 *
 * Invariant: `world` and the stacks hold the whole state of a run; a snapshot of them, put back at
 * the same addresses, restores the run. */
#ifndef SHMBUS_MODEL_COMPANION_H
#define SHMBUS_MODEL_COMPANION_H

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>

#include "subject.h"

enum {
    PROCESSES = 4,
    STACK_BYTES = 32 << 10,
    MEMORY_BYTES = 8 << 10,
    LOCKS = 32,
    DELAYED = 4, /* simultaneously late stores of a process */
};

enum state { P_UNUSED = 0, P_READY, P_BLOCKED, P_DONE, P_DEAD };
enum variant { V_RUN = 0, V_DELAY_STORE, V_KILL, V_TIMEOUT };

struct late_store {
    uint64_t value;
    uint32_t offset, size;
};

struct process {
    jmp_buf at;
    uint8_t *lowest; /* of its stack, in use */
    uint64_t history; /* of every observation */
    enum state state;
    enum variant variant;
    const char *where;
    bool started, is_store;
    uint32_t futex; /* of its sleep, or NOWHERE */
    int wait_result;
    uint32_t late_count;
    struct late_store late[DELAYED];
    subject own;
};
#define NOWHERE UINT32_MAX

struct control {
    struct ghost ghost;
    uint8_t exclusive[LOCKS]; /* process + 1 */
    uint8_t shared[LOCKS];    /* by bit */
    int8_t current;
    uint8_t preemptions, deaths, delays, timeouts;
};

struct world {
    struct control control;
    struct process processes[PROCESSES];
    alignas(64) uint8_t memory[MEMORY_BYTES];
};
extern struct world world;
extern int running; /* or -1 */

struct scenario {
    const char *name;
    const char *about;
    void (*scripts[PROCESSES])(void);
    uint32_t slots;
    uint8_t mortal; /* by bit */
};

/* A process of a scenario with a single call. */
#define ROLE(name, call)                                                                         \
    static void name(void) {                                                                     \
        call;                                                                                    \
    }

struct bounds {
    unsigned preemptions, deaths, delays;
    uint64_t states;
};
extern struct bounds bounds;

/* engine.c */
void engine_yield(const char *where, bool is_store);
void engine_pause(void); /* until everybody else waits */
void engine_observe(uint64_t value);
_Noreturn void engine_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool engine_search(const struct scenario *scenario); /* false at a bound */
extern uint64_t states_seen, runs_ended;

/* memory.c */
void memory_drain(int process); /* its stores arrive */
void memory_release_locks(int process);
uint64_t memory_hash(void);

/* scripts.c */
unsigned scripts_lock_place(int64_t byte); /* LOCKS or more for none */
extern const struct scenario scenarios[];
void scripts_prepare(const struct scenario *scenario);
bool scripts_is_owed(int process); /* whether work waits for a sleeping process */
void scripts_audit(void);          /* after everybody's end */

#endif
