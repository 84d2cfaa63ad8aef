/* Sleeping until another process has changed something: a futex word, and a flag that says that
 * somebody waits.
 *
 * Invariant: who waits has stored the flag before it looked one last time; who changes something
 * looks at the flag afterwards. Both are sequentially consistent, so at least one sees the other, and
 * while nobody waits neither side makes a system call. A waiter that dies leaves at most one spare
 * wake-up. Deaths ring nothing: where a peer's death ends a wait, it is a wait in slices. */
#ifndef SHMBUS_BASE_BELL_H
#define SHMBUS_BASE_BELL_H

#include <stdatomic.h>
#include <stdint.h>

struct bell {
    _Atomic uint32_t count;
    _Atomic uint32_t wanted;
};

enum bell_wait { BELL_RUNG = 0, BELL_TIMEOUT, BELL_INTERRUPTED };

/* Announces a wait; the caller then looks again, and gives the ticket to bell_wait. */
uint32_t bell_announce(struct bell *self);
/* Without end where the timeout is negative. */
enum bell_wait bell_wait(struct bell *self, uint32_t ticket, int64_t timeout_ns);
#define BELL_ALL UINT32_MAX
/* Wakes at most so many of those that wait. */
void bell_ring(struct bell *self, uint32_t most);
/* Wakes every process that waits, announced or not. */
void bell_ring_all(struct bell *self);

/* The calls beneath, for a bell with a meaning of its own. */
enum bell_wait futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns);
long futex_wake(_Atomic uint32_t *word, uint32_t most); /* how many were woken */

/* Orders what was stored before against what is loaded after, on both sides of a bell. */
#if defined(__SANITIZE_THREAD__)
/* ThreadSanitizer knows no fences; an addition of nothing orders as much. */
#define bell_fence(word) ((void)atomic_fetch_add_explicit(word, 0, memory_order_seq_cst))
#else
#define bell_fence(word) atomic_thread_fence(memory_order_seq_cst)
#endif

#endif
