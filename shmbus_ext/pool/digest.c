/* The digests of digest.h. */
#include "pool/digest.h"

#include "base/checksum.h"

static uint32_t digest_of(const void *data, uint64_t bytes, uint64_t block_bytes, uint32_t block) {
    uint64_t at = block * block_bytes;
    uint64_t left = bytes - at;
    return shmbus_crc32c(0, (const uint8_t *)data + at, left < block_bytes ? left : block_bytes);
}

uint32_t digest_blocks(const void *data, uint64_t bytes, uint64_t block_bytes, uint32_t *digests) {
    uint32_t blocks = (uint32_t)(bytes / block_bytes + (bytes % block_bytes != 0));
    for (uint32_t i = 0; i < blocks; i++) {
        digests[i] = digest_of(data, bytes, block_bytes, i);
    }
    return blocks;
}

uint32_t digest_first_wrong(const void *data, uint64_t bytes, uint64_t block_bytes,
                            const uint32_t *digests, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) {
        if (digest_of(data, bytes, block_bytes, i) != digests[i]) {
            return i;
        }
    }
    return to;
}
