/* Helper threads of this process that share the pieces of a batch's copy with the calling thread.
 *
 * Invariants:
 * - On return of helpers_run every piece ran once, in one thread.
 * - The caller waits only for pieces already begun, never for a helper to wake.
 * - Helpers start with the first job that wants them, and park between jobs for the life of the
 *   process. They run no signal handlers. A forked child owns no helpers, and waits for none. */
#pragma once

#include "base/threads.h"

/* Runs pieces 0 to n - 1 in up to `threads` threads: fewer where the system refuses a thread, and
 * alone while another thread of the process uses the helpers. */
void helpers_run(uint32_t threads, uint32_t pieces, threads_work *work, void *job);
