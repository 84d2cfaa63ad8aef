/* The scripts that scenarios are made of; actors.c has them. */
#ifndef SHMBUS_MODEL_ACTORS_H
#define SHMBUS_MODEL_ACTORS_H

#include "model.h"

/* How a record comes into the ring, or does not; IDLE is a long while without one. */
enum way { PUT, RESERVE, ABORT, JUMBO, IDLE };
/* What a collector does besides. */
enum habit { PLAIN, SWEEPS, MOVES };

void produce(const enum way *ways, unsigned n);
void produce_interleaved(void);
/* Acknowledges records by so many at once, until those producers have finished. */
void collect(unsigned group, uint8_t producers, enum habit habit);

#endif
