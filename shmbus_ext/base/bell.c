/* The futex calls behind bell.h. Shared futexes (no PRIVATE flag), since processes wait. */
#define _GNU_SOURCE
#include "base/bell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S INT64_C(1000000000)

enum bell_wait futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns) {
    struct timespec limit = {timeout_ns / NS_PER_S, timeout_ns % NS_PER_S};
    long rc =
        syscall(SYS_futex, word, FUTEX_WAIT, expected, timeout_ns < 0 ? NULL : &limit, NULL, 0);
    if (rc == 0 || errno == EAGAIN) {
        return BELL_RUNG;
    }
    return errno == ETIMEDOUT ? BELL_TIMEOUT : BELL_INTERRUPTED;
}

long futex_wake(_Atomic uint32_t *word, uint32_t most) {
    return syscall(SYS_futex, word, FUTEX_WAKE, most < INT_MAX ? (int)most : INT_MAX, NULL, NULL, 0);
}

uint32_t bell_announce(struct bell *self) {
    uint32_t ticket = atomic_load_explicit(&self->count, memory_order_acquire);
    /* SYNC: waiters. The flag precedes the last look for a change. */
    atomic_store_explicit(&self->wanted, 1, memory_order_seq_cst);
    bell_fence(&self->wanted);
    return ticket;
}

enum bell_wait bell_wait(struct bell *self, uint32_t ticket, int64_t timeout_ns) {
    return futex_wait(&self->count, ticket, timeout_ns);
}

void bell_ring(struct bell *self, uint32_t most) {
    /* SYNC: waiters. The change precedes the look at the flag. */
    bell_fence(&self->wanted);
    if (atomic_load_explicit(&self->wanted, memory_order_relaxed) == 0) {
        return;
    }
    atomic_store_explicit(&self->wanted, 0, memory_order_relaxed);
    /* After the flag: a waiter cleared here and not yet asleep must not fall asleep. */
    atomic_fetch_add_explicit(&self->count, 1, memory_order_seq_cst);
    if (futex_wake(&self->count, most) >= (long)(most < INT_MAX ? most : INT_MAX)) {
        /* More waiters may remain for the next ring. */
        atomic_store_explicit(&self->wanted, 1, memory_order_seq_cst);
    }
}

void bell_ring_all(struct bell *self) {
    atomic_fetch_add_explicit(&self->count, 1, memory_order_seq_cst);
    (void)futex_wake(&self->count, BELL_ALL);
}
