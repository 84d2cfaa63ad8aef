/* The futex calls behind bell.h. Shared futexes (no PRIVATE flag), since processes wait. */
#define _GNU_SOURCE
#include "channel/bell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S INT64_C(1000000000)

struct bell_words {
    _Atomic uint32_t *count;
    _Atomic uint32_t *wanted;
};

static struct bell_words words_of(struct channel_header *header, enum channel_side_name by) {
    if (by == CHANNEL_SENDER) {
        return (struct bell_words){&header->sent_bell, &header->sent_wanted};
    }
    return (struct bell_words){&header->acked_bell, &header->acked_wanted};
}

void channel_ring(struct channel_header *header, enum channel_side_name by) {
    struct bell_words words = words_of(header, by);
    /* SYNC: channel-bell. What was changed, and the count, come before the look at the flag. */
    atomic_fetch_add_explicit(words.count, 1, memory_order_seq_cst);
    if (atomic_load_explicit(words.wanted, memory_order_seq_cst) == 0) {
        return;
    }
    atomic_store_explicit(words.wanted, 0, memory_order_seq_cst);
    /* Once more: whose flag this was and who does not sleep yet may have its ticket of after the
     * first one. It must not sleep now, since no flag says so. */
    atomic_fetch_add_explicit(words.count, 1, memory_order_seq_cst);
    (void)syscall(SYS_futex, words.count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t channel_announce(struct channel_header *header, enum channel_side_name by) {
    struct bell_words words = words_of(header, by);
    uint32_t ticket = atomic_load_explicit(words.count, memory_order_acquire);
    /* SYNC: channel-bell. An exchange, so that it also comes before the loads that follow. */
    (void)atomic_exchange_explicit(words.wanted, 1, memory_order_seq_cst);
    return ticket;
}

enum channel_wait channel_wait(struct channel_header *header, enum channel_side_name by,
                               uint32_t ticket, int64_t timeout_ns) {
    struct timespec limit = {timeout_ns / NS_PER_S, timeout_ns % NS_PER_S};
    struct bell_words words = words_of(header, by);
    long rc = syscall(SYS_futex, words.count, FUTEX_WAIT, ticket, &limit, NULL, 0);
    if (rc == 0 || errno == EAGAIN) {
        return CHANNEL_RUNG;
    }
    return errno == ETIMEDOUT ? CHANNEL_TIMEOUT : CHANNEL_INTERRUPTED;
}
