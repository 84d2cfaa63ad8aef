/* The futex calls behind doorbell.h. Shared futexes (no PRIVATE flag), since processes wait. */
#define _GNU_SOURCE
#include "doorbell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S INT64_C(1000000000)

/* Orders what was stored before against what is loaded after, on both sides of a bell. */
static void full_fence(_Atomic uint32_t *word) {
#if defined(__SANITIZE_THREAD__)
    /* ThreadSanitizer knows no fences; an addition of nothing orders as much. */
    atomic_fetch_add_explicit(word, 0, memory_order_seq_cst);
#else
    (void)word;
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

static enum doorbell_wait futex_wait(_Atomic uint32_t *word, uint32_t expected,
                                     int64_t timeout_ns) {
    struct timespec ts = {timeout_ns / NS_PER_S, timeout_ns % NS_PER_S};
    long rc = syscall(SYS_futex, word, FUTEX_WAIT, expected, timeout_ns < 0 ? NULL : &ts, NULL, 0);
    if (rc == 0 || errno == EAGAIN) {
        return DOORBELL_WOKEN;
    }
    return errno == ETIMEDOUT ? DOORBELL_TIMEOUT : DOORBELL_INTERRUPTED;
}

/* How many were woken. */
static long futex_wake(_Atomic uint32_t *word, int count) {
    return syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0);
}

bool doorbell_ring(struct bus_header *header) {
    /* SYNC: bell. The fence orders the publication before the look at the bell. */
    full_fence(&header->bell);
    if (atomic_load_explicit(&header->bell, memory_order_relaxed) == 0) {
        return false;
    }
    return atomic_exchange_explicit(&header->bell, 0, memory_order_seq_cst) != 0 &&
           futex_wake(&header->bell, 1) > 0;
}

void doorbell_announce(struct bus_header *header) {
    /* SYNC: bell. The fence orders the announcement before the last look at the lanes. */
    atomic_store_explicit(&header->bell, BELL_ANNOUNCED, memory_order_seq_cst);
    full_fence(&header->bell);
}

void doorbell_stay(struct bus_header *header) {
    atomic_store_explicit(&header->bell, BELL_AWAKE, memory_order_relaxed);
}

enum doorbell_wait doorbell_sleep(struct bus_header *header, int64_t timeout_ns) {
    enum doorbell_wait result = futex_wait(&header->bell, BELL_ANNOUNCED, timeout_ns);
    doorbell_stay(header);
    return result;
}

uint32_t doorbell_want_space(struct bus_header *header) {
    uint32_t ticket = atomic_load_explicit(&header->space_bell, memory_order_acquire);
    /* SYNC: space. A flag and no count: a waiter that dies leaves at most one spare wake-up. */
    atomic_store_explicit(&header->space_wanted, 1, memory_order_seq_cst);
    full_fence(&header->space_wanted);
    return ticket;
}

enum doorbell_wait doorbell_await_space(struct bus_header *header, uint32_t ticket,
                                        int64_t timeout_ns) {
    return futex_wait(&header->space_bell, ticket, timeout_ns);
}

void doorbell_space_freed(struct bus_header *header, uint32_t extents) {
    /* SYNC: space. Orders the freed extent before the look at the flag. */
    full_fence(&header->space_wanted);
    if (atomic_load_explicit(&header->space_wanted, memory_order_relaxed) == 0) {
        return;
    }
    atomic_store_explicit(&header->space_wanted, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&header->space_bell, 1, memory_order_seq_cst);
    int most = extents < INT_MAX ? (int)extents : INT_MAX;
    if (futex_wake(&header->space_bell, most) >= most) {
        /* There may be others, for the next time. */
        atomic_store_explicit(&header->space_wanted, 1, memory_order_seq_cst);
    }
}

void doorbell_space_all(struct bus_header *header) {
    atomic_fetch_add_explicit(&header->space_bell, 1, memory_order_seq_cst);
    futex_wake(&header->space_bell, INT_MAX);
}

void doorbell_space_changed(struct bus_header *header) {
    doorbell_space_freed(header, UINT32_MAX);
}

uint32_t shared_bell_want(struct shmbus_bell *bell) {
    uint32_t ticket = atomic_load_explicit(&bell->word, memory_order_acquire);
    /* SYNC: request-bell. A flag and no count: a waiter that dies leaves at most one spare wake-up. */
    atomic_store_explicit(&bell->wanted, 1, memory_order_seq_cst);
    full_fence(&bell->wanted);
    return ticket;
}

enum doorbell_wait shared_bell_await(struct shmbus_bell *bell, uint32_t ticket, int64_t timeout_ns) {
    return futex_wait(&bell->word, ticket, timeout_ns);
}

void shared_bell_ring(struct shmbus_bell *bell, uint32_t most) {
    /* SYNC: request-bell. Orders what is new before the look at the flag. */
    full_fence(&bell->wanted);
    if (atomic_load_explicit(&bell->wanted, memory_order_relaxed) == 0) {
        return;
    }
    atomic_store_explicit(&bell->wanted, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&bell->word, 1, memory_order_seq_cst);
    int count = most < INT_MAX ? (int)most : INT_MAX;
    if (futex_wake(&bell->word, count) >= count) {
        /* There may be others, for the next time. */
        atomic_store_explicit(&bell->wanted, 1, memory_order_seq_cst);
    }
}
