/* Copying payload into the ring.
 *
 * The next reader of a producer's bytes runs on another processor. Ordinary stores leave modified
 * lines in the producer's cache: the reader fetches every line from the producer's cache, and the
 * producer fetches the lines again for its next record. Between processors without a shared cache,
 * these fetches run at a sixth of memory speed. A consumer that packs batches
 * (bus_header.consumer_packs) is fast enough to meet those lines, and gets large payload by
 * non-temporal stores. For slower consumers ordinary stores are up to twice as fast, unless the
 * live data exceeds the caches: then the overwritten lines come from memory first. */
#pragma once

#include <stddef.h>

/* Copies by non-temporal stores if large enough. */
void copy_non_temporal(void *to, const void *from, size_t bytes);

/* Call between the last non-temporal copy and the publishing release store, in the same thread. */
void copy_fence(void);
