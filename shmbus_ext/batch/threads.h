/* Threads that share the pieces of one job, such as the copy of a batch, with the thread that has it.
 *
 * Invariants:
 * - A job has ended when threads_run returns: each piece was done once, by one thread.
 * - Who has the job waits only for pieces that were begun, never for a helper to wake.
 * - Helpers run no handler of a signal. In a child of a fork there are none, and none is waited for. */
#ifndef SHMBUS_BATCH_THREADS_H
#define SHMBUS_BATCH_THREADS_H

#include <stdint.h>

struct threads;

/* Does one piece; it may run at the same time as others, in any order. */
typedef void threads_work(void *job, uint32_t piece);

/* So many helpers, parked; NULL with errno where one cannot be started. */
struct threads *threads_start(unsigned int helpers);

/* Does pieces 0 to n - 1; alone where there are no helpers, or another thread uses them. */
void threads_run(struct threads *self, uint32_t pieces, threads_work *work, void *job);

/* Joins the helpers, of which none has a job, and frees them; NULL is fine. */
void threads_end(struct threads *self);

#endif
