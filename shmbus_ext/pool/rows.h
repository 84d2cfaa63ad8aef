/* Who takes part in a pool: ranks that write, readers, and what each says of itself.
 *
 * Invariant: a row belongs to whoever holds its lock byte, so a dead process's row is free, and is
 * known for a dead one's by a pid that was not taken back. */
#ifndef SHMBUS_POOL_ROWS_H
#define SHMBUS_POOL_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "pool/pool.h"

/* Becomes a rank; rank 0 is the publisher. SHARED_HELD where a living process is it. */
enum shared_status rows_claim_writer(struct pool *self, uint32_t rank, const char *label,
                                   uint32_t pid);
/* Becomes a reader. SHARED_HELD where all rows are taken. */
enum shared_status rows_claim_reader(struct pool *self, const char *label, const char *device,
                                   uint32_t pid);
/* A regular end: the row says so, and its lock is free. */
void rows_leave(struct pool *self);

enum row_life {
    ROW_FREE = 0, /* nobody was ever there, or it ended regularly */
    ROW_ALIVE,
    ROW_DEAD,
};
enum row_life rows_writer_life(const struct pool *self, uint32_t rank);
enum row_life rows_reader_life(const struct pool *self, uint32_t row);

/* This reader runs that version. */
void rows_applied(struct pool *self, uint64_t sequence, int64_t version);
/* This reader could not take that version; what it runs stays as it was. */
void rows_refused(struct pool *self, uint64_t sequence, int64_t version, int32_t code,
                  const char *text);

#endif
