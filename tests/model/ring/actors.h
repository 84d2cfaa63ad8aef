/* The promises, and the scripts of the scenarios. */
#pragma once

#include "model.h"

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
void ghost_arrived(uint32_t offset, uint64_t before, uint64_t after);
void ghost_written(int process, uint32_t offset);
bool ghost_is_owed(int process);
void ghost_end(struct reader *reader);
uint8_t ghost_pattern(uint64_t life, uint64_t number);

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

/* How a record comes into the ring, or does not; IDLE is a long while without one,
 * WHOLE fills an extent. */
enum way { PUT, RESERVE, ABORT, JUMBO, IDLE, WHOLE };
/* Further steps of a collector; a keeping collector leaves every second record unacknowledged. */
enum habit { PLAIN, SWEEPS, MOVES, KEEPS, DELIVERS };

void produce(const enum way *ways, unsigned n);
void produce_interleaved(void);
/* A producer gives its request back, takes again, and answers. A scribbler overwrites a part of the
 * entry. */
enum patience { ASKS_ONCE, ASKS_AGAIN };
enum deed { ANSWERS, GIVES_BACK };
enum part { A_TEXT, A_NUMBER, A_CLAIM, A_BUSY_CLAIM };

void request_one(enum patience patience, uint8_t takers);
void take_request(enum deed deed, uint8_t askers);
void scribble(enum part part);

/* Puts a sample of two groups in turn; offers two groups; answers two samples. */
void put_groups(uint32_t index);
void offer_groups(void);
void work_on_groups(void);

void offer_prompt(void);
/* Takes and answers samples until these producers finished and none is left. */
void work_on_prompts(uint8_t feeders);

void audit_script(void);
void audit_retries(const struct segment *segment);
void audit_prompts(struct segment *segment);

/* Common parts of scripts. */
void map_segment(struct segment *segment); /* in the running process's view */
bool are_finished(uint8_t processes);      /* by bit: ended, or dead */
/* Acknowledges records by so many at once, until these producers finished. */
void collect(unsigned group, uint8_t producers, enum habit habit);
