/* Sleeping until a change by another process: a futex word, and a flag for waiters.
 *
 * Invariant: a waiter stores the flag before its last look; a process with a change looks at the
 * flag afterwards. Both are sequentially consistent: at least one side sees the other, and without
 * waiters neither side makes a system call. A dead waiter leaves at most one spare wake-up. A death
 * rings no bell: a wait for a mortal peer runs in slices. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

struct bell {
    _Atomic uint32_t count;
    _Atomic uint32_t wanted; /* a bit for each kind of announced waiters */
};

enum bell_wait { BELL_RUNG = 0, BELL_TIMEOUT, BELL_INTERRUPTED };

/* Announces a wait of any kind; the caller then looks again, and gives the ticket to bell_wait. */
uint32_t bell_announce(struct bell *self);
/* A negative timeout means no limit. */
enum bell_wait bell_wait(struct bell *self, uint32_t ticket, int64_t timeout_ns);
#define BELL_ALL UINT32_MAX
/* Wakes at most `most` waiters. */
void bell_ring(struct bell *self, uint32_t most);
/* The same for waiters of some kinds, a bit each: a ring for a resource spends no wake-up on
 * waiters for different resources. */
enum bell_wait bell_wait_for(struct bell *self, uint32_t kinds, uint32_t ticket,
                             int64_t timeout_ns);
void bell_ring_for(struct bell *self, uint32_t kinds, uint32_t most);
/* Wakes every waiter, announced or not. */
void bell_ring_all(struct bell *self);

/* The underlying calls, for a bell with its own protocol. */
enum bell_wait futex_wait(_Atomic uint32_t *word, uint32_t kinds, uint32_t expected,
                          int64_t timeout_ns);
long futex_wake(_Atomic uint32_t *word, uint32_t kinds, uint32_t most); /* woken waiters */

/* Orders earlier stores against later loads, on both sides of a bell. */
#if defined(__SANITIZE_THREAD__)
/* ThreadSanitizer knows no fences; an addition of 0 gives the same order. */
#define bell_fence(word) ((void)atomic_fetch_add_explicit(word, 0, memory_order_seq_cst))
#else
#define bell_fence(word) atomic_thread_fence(memory_order_seq_cst)
#endif
