/* Helper threads that share the pieces of one job with the calling thread, for example the copy of
 * a batch.
 *
 * Invariants:
 * - A job has ended on return of threads_run: every piece ran once, in one thread.
 * - The caller waits only for pieces already begun, never for a helper to wake.
 * - Helpers run no signal handlers. A forked child owns no helpers, and waits for no helper. */
#ifndef SHMBUS_BATCH_THREADS_H
#define SHMBUS_BATCH_THREADS_H

#include <stdint.h>

struct threads;

/* Runs one piece, in parallel to other pieces, in any order. */
typedef void threads_work(void *job, uint32_t piece);

/* Starts `helpers` parked helpers; NULL with errno if a thread cannot start. */
struct threads *threads_start(unsigned int helpers);

/* Runs pieces 0 to n - 1; alone without helpers, or while another thread uses them. */
void threads_run(struct threads *self, uint32_t pieces, threads_work *work, void *job);

/* Joins the idle helpers and frees them; accepts NULL. */
void threads_end(struct threads *self);

#endif
