/* Threads parked on a futex between jobs (see helpers.h).
 *
 * Invariant: a claim of a piece changes `claim`, which contains the job's number: a helper that
 * wakes late finds no piece to claim, and reads no field during a write. */
#define _GNU_SOURCE
#include "batch/helpers.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Looks at the last pieces of other threads before the futex: a piece takes a few microseconds. */
#define LOOKS_BEFORE_SLEEP 20000

static struct {
    _Atomic uint64_t claim;  /* the job's number; in the low 32 bits its number of pieces left */
    _Atomic uint32_t undone; /* unfinished pieces; futex of the job's owner */
    _Atomic uint32_t bell;   /* bumped for every job; futex of the helpers */
    _Atomic uint32_t wanted; /* helpers of the job: a bound, not a count */
    atomic_flag taken;       /* by the owner of a job */
    uint32_t pieces;         /* of the job, as the next two: stable while a piece is undone */
    threads_work *work;
    void *job;
    uint32_t started;        /* the owner's, as the next */
    bool forgets;            /* a forked child forgets the helpers */
} pool = {.taken = ATOMIC_FLAG_INIT};

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Runs the remaining pieces of the present job; returns true if this thread finished the last
 * piece. */
static bool do_pieces(void) {
    bool last = false;
    /* SYNC: piece. Reads the job's fields after the store that offers its pieces. */
    uint64_t claim = atomic_load_explicit(&pool.claim, memory_order_acquire);
    while ((uint32_t)claim != 0) {
        if (atomic_compare_exchange_weak_explicit(&pool.claim, &claim, claim - 1,
                                                  memory_order_acquire, memory_order_acquire)) {
            pool.work(pool.job, pool.pieces - (uint32_t)claim);
            /* SYNC: piece-done. Makes the piece's output visible to the job's owner. */
            last = atomic_fetch_sub_explicit(&pool.undone, 1, memory_order_acq_rel) == 1;
            claim = atomic_load_explicit(&pool.claim, memory_order_acquire);
        }
    }
    return last;
}

static void *help(void *number) {
    for (;;) {
        /* Before the look at the pieces: a later job changes the bell. */
        uint32_t heard = atomic_load_explicit(&pool.bell, memory_order_acquire);
        if ((uintptr_t)number < atomic_load_explicit(&pool.wanted, memory_order_relaxed) &&
            do_pieces()) {
            wake(&pool.undone, 1);
        }
        sleep_while(&pool.bell, heard);
    }
    return NULL;
}

static void forget_helpers(void) {
    pool.started = 0;
    atomic_store(&pool.claim, 0);
    atomic_flag_clear(&pool.taken);
}

static void start_helpers(uint32_t wanted) {
    pthread_t id;
    pool.forgets = pool.forgets || pthread_atfork(NULL, NULL, forget_helpers) == 0;
    while (pool.forgets && pool.started < wanted &&
           threads_start(&id, help, (void *)(uintptr_t)pool.started)) {
        pthread_setname_np(id, "shmbus-pack");
        pthread_detach(id);
        pool.started++;
    }
}

static void wait_until_done(void) {
    uint32_t undone;
    for (int look = 0;; look++) {
        /* SYNC: piece-done. */
        undone = atomic_load_explicit(&pool.undone, memory_order_acquire);
        if (undone == 0) {
            return;
        }
        if (look >= LOOKS_BEFORE_SLEEP) {
            sleep_while(&pool.undone, undone);
        }
    }
}

void helpers_run(uint32_t threads, uint32_t pieces, threads_work *work, void *job) {
    uint32_t wanted = (threads < THREADS_MOST ? threads : THREADS_MOST) - 1;
    if (threads < 2 || pieces < 2 ||
        atomic_flag_test_and_set_explicit(&pool.taken, memory_order_acquire)) {
        for (uint32_t i = 0; i < pieces; i++) {
            work(job, i);
        }
        return;
    }
    if (pool.started < wanted) {
        start_helpers(wanted);
    }
    pool.pieces = pieces;
    pool.work = work;
    pool.job = job;
    atomic_store_explicit(&pool.wanted, wanted, memory_order_relaxed);
    atomic_store_explicit(&pool.undone, pieces, memory_order_relaxed);
    uint64_t number = (atomic_load_explicit(&pool.claim, memory_order_relaxed) >> 32) + 1;
    /* SYNC: piece. The job's fields precede the claims of its pieces. */
    atomic_store_explicit(&pool.claim, number << 32 | pieces, memory_order_release);
    atomic_fetch_add_explicit(&pool.bell, 1, memory_order_release);
    wake(&pool.bell, INT_MAX);
    do_pieces();
    wait_until_done();
    atomic_flag_clear_explicit(&pool.taken, memory_order_release);
}
