/* How many records are still unread, by walking them; for the proof that nothing is lost. */
#ifndef SHMBUS_RING_COUNT_H
#define SHMBUS_RING_COUNT_H

#include <stdint.h>

#include "reader_state.h"

/* Committed records that this reader has not handed out, by walking them; `committed` gets the
 * commits of all lanes as of the same instant. */
uint64_t reader_count_unread(struct reader *self, uint64_t *committed);

#endif
