/* The slot pool as the subject of the explorer.
 *
 * hooked: lease publish rows
 * plain: pool
 */
#ifndef SHMBUS_MODEL_POOL_SUBJECT_H
#define SHMBUS_MODEL_POOL_SUBJECT_H

#include "pool/pool.h"

enum { MAX_VERSIONS = 32 };

typedef struct pool subject;

/* What the scripts know of each other, to check each other by. */
struct ghost {
    uint64_t finished; /* the newest sequence whose publisher has returned */
    uint8_t gone[MAX_VERSIONS]; /* sequences that a rank was told were given up */
    uint8_t whole[MAX_VERSIONS]; /* sequences of which nothing is written any more */
};

#endif
