/* Copying payload into the ring.
 *
 * What a producer writes is read next by another processor. Ordinary stores leave the lines
 * modified in the producer's cache: the reader fetches each of them from there, and the producer
 * fetches each again for its next record. Between processors that share no cache, that runs at a
 * sixth of the speed of memory. A consumer that packs batches is fast enough to meet those lines,
 * so for one that says so (bus_header.consumer_packs) large payload is written by non-temporal
 * stores. For others ordinary stores are up to twice as fast, unless what is alive at once is more
 * than the caches hold: then the lines that they write over come from memory first. */
#ifndef SHMBUS_BASE_COPY_H
#define SHMBUS_BASE_COPY_H

#include <stddef.h>

/* By non-temporal stores, where they are worth it. */
void copy_non_temporal(void *to, const void *from, size_t bytes);

/* After the last such copy and before the release store that publishes it, in the same thread. */
void copy_fence(void);

#endif
