/* Threads that share the pieces of one job with the calling thread: the first touch of a bus.
 *
 * Invariants:
 * - On return of threads_run every piece ran once, in one thread, and every other thread has ended.
 * - The threads run no signal handlers. A forked child owns no threads, and waits for no thread. */
#ifndef SHMBUS_BASE_THREADS_H
#define SHMBUS_BASE_THREADS_H

#include <stdint.h>

/* More threads would only wait for memory. */
#define THREADS_MOST 64u

/* Runs one piece, in parallel to other pieces, in any order. */
typedef void threads_work(void *job, uint32_t piece);

/* Runs pieces 0 to n - 1 in up to `threads` threads, with fewer where the system refuses a
 * thread. */
void threads_run(uint32_t threads, uint32_t pieces, threads_work *work, void *job);

#endif
