/* The slot pool as the subject of the explorer.
 *
 * hooked: lease publish rows
 * plain: pool
 * scripts: -include tests/model/hooks.h
 */
#pragma once

#include "pool/pool.h"

enum { MAX_VERSIONS = 32 };

/* Mutual knowledge of the scripts, for checks. */
struct ghost {
    struct pool own[4]; /* each process's part */
    uint64_t finished; /* the newest sequence whose publisher has returned */
    uint8_t gone[MAX_VERSIONS]; /* sequences reported to a rank as given up */
    uint8_t whole[MAX_VERSIONS]; /* sequences without further writes */
};
