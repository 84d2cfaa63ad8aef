/* The splits of a bus: who a group is for, as a number that records state and a label that people
 * give.
 *
 * Invariants:
 *  - A number keeps its label for as long as the bus exists. Number SHMBUS_SPLIT_TRAIN is "train".
 *  - No lock and no owner: whoever needs a label writes what is missing of it, each word from 0. So
 *    a death in the middle leaves the beginning of a label, which the next process that needs this
 *    label goes on with, and which is no label until then. */
#ifndef SHMBUS_RING_SPLITS_H
#define SHMBUS_RING_SPLITS_H

#include <stdint.h>

#include "segment.h"

/* Of a new segment: number SHMBUS_SPLIT_TRAIN gets its label. */
void splits_begin(const struct segment *segment);
/* The number of a label of 1 to SHMBUS_SPLIT_LABEL_BYTES bytes without NUL, which gets one if it
 * has none; SHMBUS_MAX_SPLITS where all numbers have other labels. */
uint32_t split_number(const struct segment *segment, const char *label, uint32_t bytes);
/* The same without writing; SHMBUS_MAX_SPLITS where it has none. */
uint32_t split_find(const struct segment *segment, const char *label, uint32_t bytes);
/* Copies the label of a number, and returns its bytes; 0 where it has none (yet). */
uint32_t split_label(const struct segment *segment, uint32_t number,
                     char label[SHMBUS_SPLIT_LABEL_BYTES + 1]);

#endif
