/* CRC-32C (Castagnoli, as in iSCSI, RFC 3720): finds torn and scribbled headers. Not a defence
 * against an attacker, who can compute it too: every bound is checked besides. */
#ifndef SHMBUS_BASE_CHECKSUM_H
#define SHMBUS_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

uint32_t shmbus_crc32c(uint32_t crc, const void *data, size_t bytes);

/* Bit by bit, slow: what the fast ones are tested against. */
uint32_t shmbus_crc32c_reference(uint32_t crc, const void *data, size_t bytes);

#endif
