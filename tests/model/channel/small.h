/* The channel's limits, made small: forced into every file of this explorer's build (-include), so
 * that a state is a few kilobytes. Everything that the limits bound stays as it is. */
#pragma once

#define CHANNEL_STATEMENT_BYTES 2032u
#include "channel/layout.h"

#undef CHANNEL_MAX_SLOTS
#define CHANNEL_MAX_SLOTS 2u
