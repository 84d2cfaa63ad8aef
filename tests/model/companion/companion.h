/* The explorer of what goes beside a bus, its subject: what its parts tell each other.
 *
 * engine.c   processes as coroutines, choices, snapshots, the search
 * memory.c   loads, stores, futexes and file locks, routed here by tests/model/hooks.h
 * scripts.c  of the subject: what its processes do, what must hold, and the scenarios
 * subject.h  of the subject: what a process has of it (`subject`), what the scripts know of each
 *            other (`struct ghost`)
 *
 * Invariant: all state of a run is in `world` and in the stacks; a snapshot of those, put back at
 * the same addresses, is the run as it was. */
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
    DELAYED = 4, /* stores of a process that may be late at a time */
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
    uint64_t history; /* of all that it has observed */
    enum state state;
    enum variant variant;
    const char *where;
    bool started, is_store;
    uint32_t futex; /* that it sleeps on, or NOWHERE */
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

/* A process of a scenario that is one call. */
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
void engine_pause(void); /* until nobody else can do anything */
void engine_observe(uint64_t value);
_Noreturn void engine_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool engine_search(const struct scenario *scenario); /* false when it ended at a bound */
extern uint64_t states_seen, runs_ended;

/* memory.c */
void memory_drain(int process); /* all that it stored arrives */
void memory_release_locks(int process);
uint64_t memory_hash(void);

/* scripts.c */
unsigned scripts_lock_place(int64_t byte); /* LOCKS or more for none */
extern const struct scenario scenarios[];
void scripts_prepare(const struct scenario *scenario);
bool scripts_is_owed(int process); /* whether there is work for a process that sleeps */
void scripts_audit(void);          /* when all have ended */

#endif
