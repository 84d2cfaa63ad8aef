/* The pool's limits, made small: forced into every file of this explorer's build (-include), so that
 * a state is a few kilobytes. Everything that the limits bound stays as it is. */
#pragma once

#include "pool/layout.h"

#undef POOL_HEADER_BYTES
#define POOL_HEADER_BYTES 512u
#undef POOL_MAX_SLOTS
#define POOL_MAX_SLOTS 3u
#undef POOL_MAX_RANKS
#define POOL_MAX_RANKS 2u
#undef POOL_MAX_READERS
#define POOL_MAX_READERS 2u
