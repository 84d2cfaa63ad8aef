/* Samples that producers have begun, so that others can say who is missing.
 *
 * Invariants:
 *  - A row belongs to one producer from its claim until it is freed, by that producer or, after its
 *    death, by whoever takes its slot.
 *  - A full table refuses: nobody waits, and nothing else depends on a note. */
#ifndef SHMBUS_RING_BEGUN_H
#define SHMBUS_RING_BEGUN_H

#include <stdbool.h>
#include <stdint.h>

#include "segment.h"

/* What a group is called here: a hash. */
uint64_t begun_key(const char *id, uint32_t id_bytes, int64_t round, uint32_t split);

enum begun_verdict { BEGUN_FULL, BEGUN_NOTED, BEGUN_KNOWN };

/* The producer has begun a sample, or begins it once more. */
enum begun_verdict begun_note(struct segment *segment, uint64_t producer_id, uint64_t key,
                              uint32_t index);
/* It has put it, or will not. Whether it was noted. */
bool begun_end(struct segment *segment, uint64_t producer_id, uint64_t key, uint32_t index);
/* The producer closes, or has died. */
void begun_forget(struct segment *segment, uint64_t producer_id);

#endif
