/* Claiming, leaving and writing rows (see pool.h). */
#define _GNU_SOURCE
#include "pool/pool.h"

#include <stdio.h>
#include <string.h>

#include "base/failpoints.h"
#include "base/file_lock.h"

enum shared_status rows_claim_writer(struct pool *self, uint32_t rank, const char *label,
                                   uint32_t pid) {
    enum lock_status lock = file_lock_take(self->file.fd, pool_lock_writer(rank));
    if (lock != LOCK_TAKEN) {
        return lock == LOCK_ERROR ? SHARED_SYSTEM_ERROR : SHARED_HELD;
    }
    struct rank_row *row = &self->rank_rows[rank];
    snprintf(row->label, sizeof row->label, "%s", label);
    SET_RELAXED(row->pid, pid);
    self->rank = (int32_t)rank;
    FAILPOINT("pool-writer-claimed");
    bell_ring(&self->header->ranks_bell, BELL_ALL);
    return SHARED_OK;
}

static void clear_reader(struct reader_row *row) {
    SET_RELAXED(row->applied, 0);
    SET_RELAXED(row->refused, 0);
    SET_RELAXED(row->applied_version, 0);
    SET_RELAXED(row->refused_version, 0);
    SET_RELAXED(row->holds, 0);
    SET_RELAXED(row->error_code, 0);
    row->error[0] = '\0';
}

/* Order of claims: the dead row of the same label, an empty row, the row of a further dead reader,
 * maybe the last trace of an inference server. */
enum claim_rank { CLAIM_OWN = 0, CLAIM_EMPTY, CLAIM_OTHER, CLAIM_RANKS };

static enum claim_rank claim_rank_of(const struct reader_row *row, const char *label) {
    if (ACQUIRE(row->pid) == 0) {
        return CLAIM_EMPTY;
    }
    return strncmp(row->label, label, sizeof row->label) == 0 ? CLAIM_OWN : CLAIM_OTHER;
}

enum shared_status rows_claim_reader(struct pool *self, const char *label, const char *device,
                                   uint32_t pid, bool keeps_row) {
    for (int rank = CLAIM_OWN; rank < CLAIM_RANKS; rank++) {
        for (uint32_t i = 0; i < POOL_MAX_READERS; i++) {
            struct reader_row *row = &self->reader_rows[i];
            if ((int)claim_rank_of(row, label) != rank) {
                continue;
            }
            enum lock_status lock = file_lock_take(self->file.fd, pool_lock_reader(i));
            if (lock == LOCK_ERROR) {
                return SHARED_SYSTEM_ERROR;
            }
            if (lock == LOCK_HELD_ELSEWHERE) {
                continue;
            }
            clear_reader(row);
            FAILPOINT("pool-reader-claimed");
            snprintf(row->label, sizeof row->label, "%s", label);
            snprintf(row->device, sizeof row->device, "%s", device);
            SET_RELEASE(row->pid, pid);
            self->reader = (int32_t)i;
            self->keeps_row = keeps_row;
            return SHARED_OK;
        }
    }
    return SHARED_HELD;
}

void rows_leave(struct pool *self) {
    if (self->rank >= 0) {
        uint32_t rank = (uint32_t)self->rank;
        SET_RELEASE(self->rank_rows[rank].pid, 0);
        file_lock_drop(self->file.fd, pool_lock_writer(rank));
        bell_ring(&self->header->ranks_bell, BELL_ALL);
        self->rank = -1;
    }
    if (self->reader >= 0) {
        struct reader_row *row = &self->reader_rows[self->reader];
        SET_RELAXED(row->holds, 0);
        if (!self->keeps_row) {
            SET_RELEASE(row->pid, 0);
        }
        file_lock_drop(self->file.fd, pool_lock_reader((uint32_t)self->reader));
        self->reader = -1;
    }
}

static enum row_life life(const struct pool *self, int64_t byte, const _Atomic uint32_t *pid) {
    if (file_lock_probe(self->file.fd, byte) == LOCK_HELD_ELSEWHERE) {
        return ROW_ALIVE;
    }
    return ACQUIRE(*pid) == 0 ? ROW_FREE : ROW_DEAD;
}

enum row_life rows_writer_life(const struct pool *self, uint32_t rank) {
    if (self->rank == (int32_t)rank) {
        return ROW_ALIVE; /* a probe ignores its own lock */
    }
    return life(self, pool_lock_writer(rank), &self->rank_rows[rank].pid);
}

enum row_life rows_reader_life(const struct pool *self, uint32_t row) {
    if (self->reader == (int32_t)row) {
        return ROW_ALIVE;
    }
    return life(self, pool_lock_reader(row), &self->reader_rows[row].pid);
}

void rows_applied(struct pool *self, uint64_t sequence, int64_t version) {
    struct reader_row *row = &self->reader_rows[self->reader];
    SET_RELAXED(row->applied_version, version);
    /* SYNC: pool-applied. The version precedes the sequence that makes the version count. */
    SET_RELEASE(row->applied, sequence);
    FAILPOINT("pool-applied");
    bell_ring(&self->header->ranks_bell, BELL_ALL);
}

void rows_refused(struct pool *self, uint64_t sequence, int64_t version, int32_t code,
                  const char *text) {
    struct reader_row *row = &self->reader_rows[self->reader];
    snprintf(row->error, sizeof row->error, "%s", text);
    SET_RELAXED(row->error_code, code);
    SET_RELAXED(row->refused_version, version);
    /* SYNC: pool-applied. */
    SET_RELEASE(row->refused, sequence);
    bell_ring(&self->header->ranks_bell, BELL_ALL);
}
