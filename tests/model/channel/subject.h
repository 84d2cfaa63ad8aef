/* The channel as the subject of the explorer.
 *
 * hooked: messages sides
 * scripts: -include tests/model/hooks.h
 */
#pragma once

#include "channel/channel.h"

enum { MAX_STEPS = 16 };

/* Mutual knowledge of the scripts, for checks. */
struct ghost {
    struct channel own[4]; /* each process's part */
    uint8_t role[4];             /* of each process: side + 1 */
    uint8_t holder[2];           /* of each side: process + 1, from its claim to its leaving */
    uint8_t checked[MAX_STEPS];  /* steps found whole by a receiver */
    uint8_t acked[MAX_STEPS];    /* steps with a returned acknowledgement */
};
