/* The scripts of the scenarios, in actors.c, admission.c, prompts.c and retries.c. */
#ifndef SHMBUS_MODEL_ACTORS_H
#define SHMBUS_MODEL_ACTORS_H

#include "model.h"

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

/* Common parts of scripts. */
void map_segment(struct segment *segment); /* in the running process's view */
bool are_finished(uint8_t processes);      /* by bit: ended, or dead */
/* Acknowledges records by so many at once, until these producers finished. */
void collect(unsigned group, uint8_t producers, enum habit habit);

#endif
