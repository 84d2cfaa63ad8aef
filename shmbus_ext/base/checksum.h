/* CRC-32C (Castagnoli, as in iSCSI, RFC 3720): finds torn and scribbled headers. No defence against
 * an attacker, who can compute the checksum too: bounds are checked as well. */
#pragma once

#include <stddef.h>
#include <stdint.h>

uint32_t shmbus_crc32c(uint32_t crc, const void *data, size_t bytes);
