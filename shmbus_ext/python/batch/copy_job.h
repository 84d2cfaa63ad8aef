/* Copying sequences into the columns of a batch, in pieces that several threads may share.
 *
 * Invariant: what is copied does not depend on the number of threads: each element is written once,
 * by the same conversion. */
#ifndef SHMBUS_PYTHON_COPY_JOB_H
#define SHMBUS_PYTHON_COPY_JOB_H

#include <stdatomic.h>

#include "batch/threads.h"
#include "python/batch/extra_fields.h"
#include "python/batch/field_lookup.h"

struct piece {
    uint32_t sequence, from, tokens;
};

struct copy_job {
    const struct source *sources;
    const struct extras *extras;
    const double *gains; /* of each sequence, where it brings no advantages of its own */
    const int32_t *borders;
    struct piece *pieces;
    uint32_t count;
    int64_t *tokens, *positions;
    uint8_t *mask;
    float *logprobs, *advantages;
    _Atomic bool not_finite;
};

/* Finds the pieces of so many sequences, of so many tokens in all; false with an exception. */
bool py_copy_job_cut(struct copy_job *job, Py_ssize_t sequences, uint64_t total);
/* Copies all of them, without the interpreter lock; whether all logprobs and advantages are finite. */
bool py_copy_job_run(struct copy_job *job, struct threads *helpers);
void py_copy_job_clear(struct copy_job *job);

#endif
