/* The explorer's parts, and their interfaces.
 *
 * engine.c   processes as coroutines, choices, snapshots, the search
 * memory.c   visibility of stores to loads; futexes, locks, the clock
 * ghost.c    promises: told by the scripts, checked at each step and at each end
 * ghost_retry.c  promises of retry requests
 * actors.c   steps of a producer, a collector and the auditor
 * admission.c  steps of puts and workers under a bound on the lead
 * prompts.c  steps of a feeder and workers with the request lane
 * retries.c  steps of the collector and the producers of retry requests
 * explore.c  the scenarios, the command line
 *
 * Invariant: `world` and the stacks hold the whole state of a run; a snapshot of them, put back at
 * the same addresses, restores the run. */
#ifndef SHMBUS_MODEL_H
#define SHMBUS_MODEL_H

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "ring/reader.h"

enum {
    MAX_PROCESSES = 5, /* the last is the auditor */
    AUDITOR = MAX_PROCESSES - 1,
    SEGMENT_ROOM = 12 << 10, /* bytes */
    HEAP_BYTES = 24 << 10,
    STACK_BYTES = 64 << 10,
    BUFFER_ENTRIES = 8,
    MAX_LIVES = 16,
    MAX_RECORDS = 8, /* of a producer's life */
    MAX_SLOTS = 4,
    MAX_ACK_SETS = 32,
    MAX_REQUESTS = 8,
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
    bool started, mortal, timed;
    bool patient; /* sleeps for lack of work */
    int wait_result;
    uint32_t heap_used;
    uint32_t buffered_count;
    struct buffered buffered[BUFFER_ENTRIES];
};
#define NOWHERE UINT32_MAX

enum record_fate { R_NONE = 0, R_OPEN, R_BEGUN, R_COMMITTED, R_ABORTED };

enum ack_stage { ACK_NONE = 0, ACK_BEGUN, ACK_DONE };

struct ghost_record {
    uint8_t fate;
    uint8_t acked; /* enum ack_stage */
    uint8_t ack_set;
    uint8_t moving;
    uint8_t owner; /* process */
    uint8_t before; /* earlier records of its producer, by bit */
    uint16_t delivered_to; /* collectors, by bit */
    uint32_t from, to;     /* bytes of the segment */
};

/* A request is a number from 1, 0 for none; a process counts from 1 here. */
struct ghost_retry {
    uint8_t asked;     /* requests so far */
    uint8_t published; /* the last request to arrive in the table */
    uint8_t current;   /* request of the row, for a claimant */
    uint8_t claimed[MAX_PROCESSES]; /* request of the row at the process's claim */
    uint8_t holder[MAX_REQUESTS + 1];
    uint8_t askers, takers; /* by bit */
    bool answered;
};

struct ghost {
    struct ghost_retry retry;
    struct ghost_record records[MAX_LIVES][MAX_RECORDS];
    uint8_t ack_set_undone[MAX_ACK_SETS];
    uint8_t ack_set_owner[MAX_ACK_SETS]; /* process */
    uint8_t ack_sets;
    uint8_t prompt_answers[2]; /* read answers, by index; of groups of two */
    uint8_t readers; /* lives of collectors so far */
    uint8_t finished; /* closed or dead producers, by bit */
};

/* Shared state outside of the segment's memory. */
struct control {
    uint64_t memory_hash;
    uint64_t clock_ns;
    struct ghost ghost;
    uint8_t lock_owner[MAX_SLOTS + 2]; /* process + 1; last the collector's and the feeders' */
    int8_t current;
    uint8_t preemptions, deaths, delays, timeouts;
    uint8_t vain; /* processes with a vain look since the last change, by bit */
};

struct world {
    struct control control;
    struct process processes[MAX_PROCESSES];
    alignas(64) uint8_t memory[SEGMENT_ROOM];
    alignas(64) uint8_t shadow[SEGMENT_ROOM]; /* memory as of the last step */
    alignas(64) uint8_t view[MAX_PROCESSES][SEGMENT_ROOM];
    alignas(64) uint8_t known[MAX_PROCESSES][SEGMENT_ROOM]; /* the view, less its own new stores */
    alignas(64) uint8_t heap[MAX_PROCESSES][HEAP_BYTES];
};
extern struct world world;
extern uint8_t stacks[MAX_PROCESSES][STACK_BYTES];
extern struct segment template_segment;
extern uint32_t segment_bytes;
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
    unsigned extents, producers; /* producers: slots */
    uint8_t mortal;              /* processes that may die, by bit */
    unsigned deaths;
    unsigned preemptions; /* UINT_MAX for no bound */
    unsigned max_lead; /* groups; 0 for no bound */
};

/* engine.c */
void engine_prepare(const struct scenario *scenario);
bool engine_search(const struct scenario *scenario); /* false at a bound */
void engine_yield(enum operation op, uint32_t offset, int order,
                  const char *where);
_Noreturn void engine_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void engine_pause(void); /* until everybody else waits */
void engine_observe(uint64_t value);
void engine_checkpoint(void); /* the heap holds the whole knowledge of a script */
extern uint64_t states_seen, steps_taken, runs_ended, deaths_tried;

/* memory.c */
uint64_t mix_hash(uint64_t hash, uint64_t value);
uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes);
void memory_settle(int process);       /* notes a step's stores, and checks their owner */
void memory_flush(int process);        /* its stores arrive */
bool memory_has_plain_stores(int process);
bool memory_store_is_plain_relaxed(const struct process *p);
uint64_t memory_hash_view(uint64_t hash, int process);
void *memory_heap(int process, size_t bytes);
uint64_t memory_word(uint32_t offset, uint32_t size);

/* ghost.c */
void ghost_claimed(uint64_t life, uint64_t number, const struct reservation *at);
void ghost_begin_commit(uint64_t life, uint64_t number);
void ghost_committed(uint64_t life, uint64_t number);
void ghost_aborted(uint64_t life, uint64_t number);
unsigned ghost_new_reader(void);
void ghost_delivered(const struct reader *reader, const struct record_ref *ref,
                     unsigned reader_life);
void ghost_begin_ack(const uint64_t (*keys)[2], unsigned n);
void ghost_acked(const uint64_t (*keys)[2], unsigned n);
void ghost_moving(uint64_t life, uint64_t number, const struct record_ref *to);
void ghost_extent_freed(uint32_t extent, uint64_t word);
void ghost_data_written(int process, uint32_t offset);
bool ghost_is_owed(uint32_t futex);
void ghost_end(struct reader *reader);
uint8_t ghost_pattern(uint64_t life, uint64_t number);
bool ghost_is_alive(int process);

/* ghost_retry.c */
uint64_t ghost_asks(void); /* the number of a new request */
void ghost_takes(void);
void ghost_claim_word(uint64_t before, uint64_t after);
void ghost_handed(uint64_t number);
void ghost_gives_back(uint64_t number);
void ghost_answered(void);
void ghost_counts_dead(uint64_t number, uint64_t claimant);
bool ghost_wants(void);
bool ghost_wants_in_vain(void);

/* actors.c */
void audit_script(void);
/* retries.c */
void audit_retries(const struct segment *segment);
/* prompts.c */
void audit_prompts(struct segment *segment);

#endif
