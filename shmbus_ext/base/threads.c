/* Threads without signal handlers (see threads.h). */
#define _GNU_SOURCE
#include "base/threads.h"

#include <signal.h>
#include <stdatomic.h>

bool threads_start(pthread_t *id, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(id, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed == 0;
}

struct shared_job {
    threads_work *work;
    void *job;
    uint32_t pieces;
    _Atomic uint32_t next;
};

static void *run_pieces(void *argument) {
    struct shared_job *self = argument;
    uint32_t piece;
    /* Starting and joining a thread order its reads and writes. */
    while ((piece = atomic_fetch_add_explicit(&self->next, 1, memory_order_relaxed)) <
           self->pieces) {
        self->work(self->job, piece);
    }
    return NULL;
}

void threads_run(uint32_t threads, uint32_t pieces, threads_work *work, void *job) {
    struct shared_job shared = {work, job, pieces, 0};
    pthread_t ids[THREADS_MOST];
    uint32_t started = 0, wanted = threads < pieces ? threads : pieces;
    while (started + 1 < wanted && started < THREADS_MOST &&
           threads_start(&ids[started], run_pieces, &shared)) {
        started++;
    }
    run_pieces(&shared);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(ids[i], NULL);
    }
}
