/* Digests of a slot's payload by block: CRC-32C, the same value on every machine. They find bytes
 * that changed by accident, not an attacker. */
#ifndef SHMBUS_POOL_DIGEST_H
#define SHMBUS_POOL_DIGEST_H

#include <stdint.h>

/* One value a block of `block_bytes`; the last block may be shorter. Returns how many. */
uint32_t digest_blocks(const void *data, uint64_t bytes, uint64_t block_bytes, uint32_t *digests);
/* The first block in [from, to) that differs from its digest; `to` for none. */
uint32_t digest_first_wrong(const void *data, uint64_t bytes, uint64_t block_bytes,
                            const uint32_t *digests, uint32_t from, uint32_t to);

#endif
