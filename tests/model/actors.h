/* The scripts that scenarios are made of; actors.c has them. */
#ifndef SHMBUS_MODEL_ACTORS_H
#define SHMBUS_MODEL_ACTORS_H

#include "model.h"

/* How a record comes into the ring, or does not; IDLE is a long while without one,
 * WHOLE fills an extent. */
enum way { PUT, RESERVE, ABORT, JUMBO, IDLE, WHOLE };
/* What a collector does besides; one that keeps leaves every other record unacknowledged. */
enum habit { PLAIN, SWEEPS, MOVES, KEEPS };

void produce(const enum way *ways, unsigned n);
void produce_interleaved(void);
/* Acknowledges records by so many at once, until those producers have finished. */
void collect(unsigned group, uint8_t producers, enum habit habit);

#endif
