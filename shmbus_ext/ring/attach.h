/* How a collector begins, how it ends, and how it looks for dead producers.
 *
 * Invariant: what an earlier collector intended is ended first, then what dead producers left, and
 * only then is anything counted or read. */
#ifndef SHMBUS_RING_ATTACH_H
#define SHMBUS_RING_ATTACH_H

#include <stdbool.h>
#include <stdint.h>

#include "reader_state.h"

/* The caller holds the collector's lock. False when memory is short. */
bool reader_attach(struct reader *self, struct segment *segment);
void reader_detach(struct reader *self);

/* Reaps: takes over the lanes of producers that are proved dead, and tidies. Returns how many were
 * found dead. */
uint32_t reader_sweep(struct reader *self);

#endif
