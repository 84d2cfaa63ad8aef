/* The futex calls behind bell.h. Shared futexes (no PRIVATE flag), since processes wait. */
#define _GNU_SOURCE
#include "base/bell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

#define NS_PER_S UINT64_C(1000000000)

enum bell_wait futex_wait(_Atomic uint32_t *word, uint32_t kinds, uint32_t expected,
                          int64_t timeout_ns) {
    uint64_t until_ns = timeout_ns < 0 ? 0 : clock_monotonic_ns() + (uint64_t)timeout_ns;
    struct timespec until = {(time_t)(until_ns / NS_PER_S), (long)(until_ns % NS_PER_S)};
    long rc = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, timeout_ns < 0 ? NULL : &until,
                      NULL, kinds);
    if (rc == 0 || errno == EAGAIN) {
        return BELL_RUNG;
    }
    return errno == ETIMEDOUT ? BELL_TIMEOUT : BELL_INTERRUPTED;
}

long futex_wake(_Atomic uint32_t *word, uint32_t kinds, uint32_t most) {
    return syscall(SYS_futex, word, FUTEX_WAKE_BITSET, most < INT_MAX ? (int)most : INT_MAX, NULL,
                   NULL, kinds);
}

uint32_t bell_announce(struct bell *self) {
    uint32_t ticket = atomic_load_explicit(&self->count, memory_order_acquire);
    /* SYNC: waiters. The flag precedes the last look for a change. */
    atomic_store_explicit(&self->wanted, BELL_ALL, memory_order_seq_cst);
    bell_fence(&self->wanted);
    return ticket;
}

enum bell_wait bell_wait_for(struct bell *self, uint32_t kinds, uint32_t ticket,
                             int64_t timeout_ns) {
    return futex_wait(&self->count, kinds, ticket, timeout_ns);
}

enum bell_wait bell_wait(struct bell *self, uint32_t ticket, int64_t timeout_ns) {
    return bell_wait_for(self, BELL_ALL, ticket, timeout_ns);
}

/* The count follows the change: a waiter announced before and not yet asleep must not fall asleep. */
static long wake(struct bell *self, uint32_t kinds, uint32_t most) {
    atomic_fetch_add_explicit(&self->count, 1, memory_order_seq_cst);
    return futex_wake(&self->count, kinds, most);
}

void bell_ring_for(struct bell *self, uint32_t kinds, uint32_t most) {
    /* SYNC: waiters. The change precedes the look at the flag. */
    bell_fence(&self->wanted);
    if ((atomic_load_explicit(&self->wanted, memory_order_relaxed) & kinds) == 0 || most == 0) {
        return;
    }
    if (most < INT_MAX && wake(self, kinds, most) == (long)most) {
        return; /* more waiters may remain for the next ring */
    }
    /* A cleared flag silences other rings: the wake-up that follows leaves no waiter asleep. */
    atomic_fetch_and_explicit(&self->wanted, ~kinds, memory_order_relaxed);
    (void)wake(self, kinds, BELL_ALL);
}

void bell_ring(struct bell *self, uint32_t most) {
    bell_ring_for(self, BELL_ALL, most);
}

void bell_ring_all(struct bell *self) {
    (void)wake(self, BELL_ALL, BELL_ALL);
}
