/* The layout's limits, made small: forced into every file of the explorer's build (-include).
 *
 * Extents of 512 bytes hold two records of 256, so that a handful of puts goes through leasing,
 * sealing, linking and freeing; everything that those limits bound stays as it is. */
#ifndef SHMBUS_MODEL_SMALL_H
#define SHMBUS_MODEL_SMALL_H

#include "ring/layout.h"

#undef SHMBUS_PAGE
#define SHMBUS_PAGE 512u
#undef SHMBUS_MAX_GROUP_SIZE
#define SHMBUS_MAX_GROUP_SIZE 16u
#undef SHMBUS_RETRY_ENTRIES
#define SHMBUS_RETRY_ENTRIES 1u
#undef SHMBUS_MAX_SHAPE_WORDS
#define SHMBUS_MAX_SHAPE_WORDS 4u
#undef SHMBUS_MAX_SCHEMA_BYTES
#define SHMBUS_MAX_SCHEMA_BYTES 32u

#endif
