/* The explorer's parts, and their interfaces.
 *
 * engine.c   processes as coroutines, choices, snapshots, the search
 * memory.c   visibility of stores to loads; futexes, locks, the clock
 * explore.c  the command line
 *
 * A subject (ring, pool, channel) has a folder: subject.h names the sources, and has the knowledge of
 * its scripts (`struct ghost`); small.h makes the limits of its layout small; the rest are steps of
 * its processes, promises, and the scenarios (`subject`).
 *
 * Invariant: `world` and the stacks hold the whole state of a run; a snapshot of them, put back at
 * the same addresses, restores the run. */
#pragma once

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "subject.h"

enum {
    MAX_PROCESSES = 5, /* the last is the auditor */
    AUDITOR = MAX_PROCESSES - 1,
    MEMORY_BYTES = 12 << 10,
    HEAP_BYTES = 24 << 10,
    STACK_BYTES = 64 << 10,
    BUFFER_ENTRIES = 8,
    LOCKS = 32,
};

enum operation {
    OP_START,
    OP_LOAD,
    OP_STORE,
    OP_RMW,
    OP_FENCE,
    OP_LOCK,
    OP_UNLOCK,
    OP_WAIT,
    OP_WAKE,
    OP_COPY, /* in the middle of a copy, or at its end */
};

enum process_state { P_UNUSED = 0, P_READY, P_BLOCKED, P_DONE, P_DEAD };

/* Permission of the scheduler for the store buffer of a process's next operation. */
enum variant {
    V_PLAIN = 0,
    V_KEEP_PLAIN_STORES,
    V_BUFFER_STORE,
    V_FLUSH_FIRST,
    V_PLAIN_STORES_FIRST,
    V_KILL,
    V_TIMEOUT,
};

struct buffered {
    uint64_t value;
    uint32_t offset;
    uint32_t size;
};

struct process {
    jmp_buf at;
    uint8_t *lowest; /* of its stack, in use */
    uint64_t history; /* of every observation since the last checkpoint */
    enum process_state state;
    enum operation op;
    int order;
    const char *where; /* file and line of the operation */
    uint32_t offset; /* of the operation, or NOWHERE */
    uint32_t futex;
    uint32_t kinds; /* of wake-ups, by bit */
    enum variant variant;
    bool started, timed;
    bool patient; /* sleeps for lack of work */
    int wait_result;
    uint32_t heap_used;
    uint32_t buffered_count;
    struct buffered buffered[BUFFER_ENTRIES];
};
#define NOWHERE UINT32_MAX

/* Shared state outside of the memory. */
struct control {
    uint64_t memory_hash;
    uint64_t clock_ns;
    struct ghost ghost;
    uint8_t exclusive[LOCKS]; /* process + 1 */
    uint8_t shared[LOCKS];    /* by bit */
    uint8_t finished;         /* ended or dead processes, by bit */
    int8_t current;
    uint8_t preemptions, deaths, delays, timeouts;
    uint8_t vain; /* processes with a vain look since the last change, by bit */
};

struct world {
    struct control control;
    struct process processes[MAX_PROCESSES];
    alignas(64) uint8_t memory[MEMORY_BYTES];
    alignas(64) uint8_t shadow[MEMORY_BYTES]; /* memory as of the last step */
    alignas(64) uint8_t view[MAX_PROCESSES][MEMORY_BYTES];
    alignas(64) uint8_t known[MAX_PROCESSES][MEMORY_BYTES]; /* the view, less its own new stores */
    alignas(64) uint8_t heap[MAX_PROCESSES][HEAP_BYTES];
};
extern struct world world;
extern uint32_t memory_bytes; /* of `world.memory`, in use */
extern int running; /* the running process, or -1 */

struct bounds {
    unsigned preemptions; /* UINT_MAX for no bound */
    unsigned deaths;
    unsigned delays;
    uint64_t states;
    bool weak; /* stores arrive late, loads are stale without acquire */
};
extern struct bounds bounds;

struct scenario {
    const char *name;
    const char *about;
    void (*scripts[MAX_PROCESSES - 1])(void);
    uint8_t mortal; /* processes that may die, by bit */
    unsigned deaths;
    unsigned preemptions; /* UINT_MAX for no bound */
    unsigned slots; /* of the subject */
    unsigned extents, max_lead; /* of a ring; groups, 0 for no bound */
};

/* A process of a scenario with a single call. */
#define ROLE(name, call)                                                                         \
    static void name(void) {                                                                     \
        call;                                                                                    \
    }

struct range {
    uint32_t from, to;
};

struct subject {
    const struct scenario *scenarios; /* up to the first without a name */
    /* Fills the memory, and returns its bytes. */
    uint32_t (*prepare)(const struct scenario *scenario);
    unsigned (*lock_place)(int64_t byte); /* LOCKS or more for none */
    bool (*is_owed)(int process); /* whether work waits for a sleeping process */
    void (*audit)(void);          /* after everybody's end, as the auditor */
    /* Further, or NULL. */
    const struct range *plain; /* two ranges of plain stores: in the weak model these have views */
    bool (*may_give_up)(void); /* whether a process with vain waits may end */
    bool (*is_one_copy)(uint32_t offset); /* no process is switched to within */
    void (*written)(int process, uint32_t offset);
    void (*arrived)(uint32_t offset, uint64_t before, uint64_t after);
};
extern const struct subject subject;

/* engine.c */
bool engine_search(const struct scenario *scenario); /* false at a bound */
void engine_yield(enum operation op, uint32_t offset, int order,
                  const char *where);
_Noreturn void engine_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Until everybody else waits. A patient process looks as often as there are changes: its heap is its
 * whole knowledge. */
void engine_pause(bool patient);
void engine_observe(uint64_t value);
void engine_checkpoint(void); /* the heap holds the whole knowledge of a script */
bool engine_is_alive(int process);
extern uint64_t states_seen, steps_taken, runs_ended, deaths_tried;

/* memory.c */
uint64_t mix_hash(uint64_t hash, uint64_t value);
uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes);
void memory_settle(int process);       /* notes a step's stores, and checks their owner */
void memory_flush(int process);        /* its stores arrive */
void memory_release_locks(int process);
bool memory_has_plain_stores(int process);
bool memory_store_is_plain_relaxed(const struct process *p);
uint64_t memory_hash_view(uint64_t hash, int process);
void *memory_heap(int process, size_t bytes);
uint64_t memory_word(uint32_t offset, uint32_t size);
