/* The layout's limits, made small: forced into every file of the explorer's build (-include).
 *
 * Extents of 512 bytes hold two records of 256: a handful of puts goes through leasing, sealing,
 * linking and freeing. The bounds built on these limits stay unchanged. */
#pragma once

#define SHMBUS_DECLARED_BYTES 56u
#define SHMBUS_RELAY_MIN_ENTRIES 1u
#include "ring/layout.h"

#undef SHMBUS_PAGE
#define SHMBUS_PAGE 512u
#undef SHMBUS_MAX_GROUP_SIZE
#define SHMBUS_MAX_GROUP_SIZE 16u
#undef SHMBUS_RETRY_ENTRIES
#define SHMBUS_RETRY_ENTRIES 1u
#undef SHMBUS_MAX_SPLITS
#define SHMBUS_MAX_SPLITS 2u
#undef SHMBUS_CANCELLED
#define SHMBUS_CANCELLED 1u
#undef SHMBUS_MAX_SHAPE_WORDS
#define SHMBUS_MAX_SHAPE_WORDS 4u
#undef SHMBUS_MAX_SCHEMA_BYTES
#define SHMBUS_MAX_SCHEMA_BYTES 32u

#undef SHMBUS_LEAD_ROWS
#define SHMBUS_LEAD_ROWS 2u
#undef SHMBUS_REQUEST_MIN_BYTES
#define SHMBUS_REQUEST_MIN_BYTES UINT64_C(1536)
#undef SHMBUS_REQUEST_LEVELS
#define SHMBUS_REQUEST_LEVELS 1u
#undef SHMBUS_REQUEST_MIN_ROWS
#define SHMBUS_REQUEST_MIN_ROWS 2u
#undef SHMBUS_REQUEST_CELLS_A_ROW
#define SHMBUS_REQUEST_CELLS_A_ROW 2u
#undef SHMBUS_REQUEST_CELLS_A_BLOCK
#define SHMBUS_REQUEST_CELLS_A_BLOCK 2u
