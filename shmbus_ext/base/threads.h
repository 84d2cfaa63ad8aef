/* Threads of the core, and jobs whose pieces several threads share: the first touch of a bus.
 *
 * Invariants:
 * - On return of threads_run every piece ran once, in one thread, and every other thread has ended.
 * - The threads run no signal handlers. A forked child owns no threads, and waits for no thread. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* More threads would only wait for memory. */
#define THREADS_MOST 64u

/* Runs one piece, in parallel to other pieces, in any order. */
typedef void threads_work(void *job, uint32_t piece);

/* Starts a thread without signal handlers; false where the system refuses a thread. */
bool threads_start(pthread_t *id, void *(*run)(void *), void *argument);

/* Runs pieces 0 to n - 1 in up to `threads` threads, with fewer where the system refuses a
 * thread. */
void threads_run(uint32_t threads, uint32_t pieces, threads_work *work, void *job);
