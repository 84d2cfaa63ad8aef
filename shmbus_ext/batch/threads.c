/* The helpers behind batch/threads.h, parked on a futex between jobs.
 *
 * Invariant: a claim of a piece changes `claim`, which contains the job's number: a helper that
 * wakes late finds no piece to claim, and reads no field during a write. */
#define _GNU_SOURCE
#include "threads.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Looks at the last pieces of other threads before the futex: a piece takes a few microseconds. */
#define LOOKS_BEFORE_SLEEP 20000

struct threads {
    _Atomic uint64_t claim;    /* the job's number, and in the low 32 bits its number of pieces
                                * left */
    _Atomic uint32_t undone;   /* unfinished pieces; futex of the job's owner */
    _Atomic uint32_t bell;     /* bumped for every job, and at the end; futex of the helpers */
    _Atomic bool ending;
    atomic_flag taken;         /* by the owner of a job */
    uint32_t pieces;           /* of the job, as the next two: stable while a piece is undone */
    threads_work *work;
    void *job;
    pid_t pid;                 /* the process that owns the helpers */
    unsigned int helpers;
    pthread_t ids[];
};

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Runs the remaining pieces of the present job; returns true if this thread finished the last
 * piece. */
static bool do_pieces(struct threads *self) {
    bool last = false;
    /* SYNC: piece. Reads the job's fields after the store that offers its pieces. */
    uint64_t claim = atomic_load_explicit(&self->claim, memory_order_acquire);
    while ((uint32_t)claim != 0) {
        if (atomic_compare_exchange_weak_explicit(&self->claim, &claim, claim - 1,
                                                  memory_order_acquire, memory_order_acquire)) {
            self->work(self->job, self->pieces - (uint32_t)claim);
            /* SYNC: piece-done. Makes the piece's output visible to the job's owner. */
            last = atomic_fetch_sub_explicit(&self->undone, 1, memory_order_acq_rel) == 1;
            claim = atomic_load_explicit(&self->claim, memory_order_acquire);
        }
    }
    return last;
}

static void *help(void *argument) {
    struct threads *self = argument;
    for (;;) {
        /* Before the look at the pieces: a later job changes the bell. */
        uint32_t heard = atomic_load_explicit(&self->bell, memory_order_acquire);
        if (atomic_load_explicit(&self->ending, memory_order_acquire)) {
            return NULL;
        }
        if (do_pieces(self)) {
            wake(&self->undone, 1);
        }
        sleep_while(&self->bell, heard);
    }
}

static void ring(struct threads *self) {
    atomic_fetch_add_explicit(&self->bell, 1, memory_order_release);
    wake(&self->bell, INT_MAX);
}

static int start_helper(struct threads *self) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&self->ids[self->helpers], NULL, help, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed == 0) {
        pthread_setname_np(self->ids[self->helpers], "shmbus-pack");
        self->helpers++;
    }
    return failed;
}

struct threads *threads_start(unsigned int helpers) {
    struct threads *self = calloc(1, sizeof *self + helpers * sizeof *self->ids);
    if (self == NULL) {
        errno = ENOMEM;
        return NULL;
    }
    atomic_flag_clear(&self->taken);
    self->pid = getpid();
    while (self->helpers < helpers) {
        int failed = start_helper(self);
        if (failed != 0) {
            threads_end(self);
            errno = failed;
            return NULL;
        }
    }
    return self;
}

static void wait_until_done(struct threads *self) {
    uint32_t undone;
    for (int look = 0;; look++) {
        /* SYNC: piece-done. */
        undone = atomic_load_explicit(&self->undone, memory_order_acquire);
        if (undone == 0) {
            return;
        }
        if (look >= LOOKS_BEFORE_SLEEP) {
            sleep_while(&self->undone, undone);
        }
    }
}

void threads_run(struct threads *self, uint32_t pieces, threads_work *work, void *job) {
    if (self == NULL || pieces < 2 || self->helpers == 0 || self->pid != getpid() ||
        atomic_flag_test_and_set_explicit(&self->taken, memory_order_acquire)) {
        for (uint32_t i = 0; i < pieces; i++) {
            work(job, i);
        }
        return;
    }
    self->pieces = pieces;
    self->work = work;
    self->job = job;
    atomic_store_explicit(&self->undone, pieces, memory_order_relaxed);
    uint64_t number = (atomic_load_explicit(&self->claim, memory_order_relaxed) >> 32) + 1;
    /* SYNC: piece. The job's fields precede the claims of its pieces. */
    atomic_store_explicit(&self->claim, number << 32 | pieces, memory_order_release);
    ring(self);
    do_pieces(self);
    wait_until_done(self);
    atomic_flag_clear_explicit(&self->taken, memory_order_release);
}

void threads_end(struct threads *self) {
    if (self == NULL) {
        return;
    }
    if (self->pid == getpid()) {
        atomic_store_explicit(&self->ending, true, memory_order_release);
        ring(self);
        for (unsigned int i = 0; i < self->helpers; i++) {
            pthread_join(self->ids[i], NULL);
        }
    }
    free(self);
}
