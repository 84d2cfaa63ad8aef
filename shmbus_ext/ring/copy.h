/* Copying payload into the ring.
 *
 * What a producer writes is read next by another processor. Stores that leave lines modified in the
 * producer's cache make that one fetch each of them from there, and the producer fetch each again
 * for its next record: between processors that share no cache that goes at a sixth of the speed of
 * memory. A consumer that packs batches is fast enough to meet those lines there, so for one that
 * says that it does (bus_header.gathered) large payload is written past the caches. Others get it
 * the ordinary way, which is up to twice as fast. */
#ifndef SHMBUS_RING_COPY_H
#define SHMBUS_RING_COPY_H

#include <stddef.h>

void copy_past_caches(void *to, const void *from, size_t bytes);

/* After the last copy and before the release store that publishes it, in the same thread. */
void copy_fence(void);

#endif
