/* The collector's bell (see segment.h). */
#include "segment.h"

bool doorbell_ring(struct bus_header *header) {
    /* SYNC: bell. The fence orders the publication before the look at the bell. */
    bell_fence(&header->bell);
    if (RELAXED(header->bell) == 0) {
        return false;
    }
    return atomic_exchange_explicit(&header->bell, 0, memory_order_seq_cst) != 0 &&
           futex_wake(&header->bell, BELL_ALL, 1) > 0;
}

void doorbell_announce(struct bus_header *header) {
    /* SYNC: bell. The fence orders the announcement before the last look at the lanes. */
    atomic_store_explicit(&header->bell, BELL_ANNOUNCED, memory_order_seq_cst);
    bell_fence(&header->bell);
}

void doorbell_stay(struct bus_header *header) {
    SET_RELAXED(header->bell, BELL_AWAKE);
}

enum bell_wait doorbell_sleep(struct bus_header *header, int64_t timeout_ns) {
    enum bell_wait result = futex_wait(&header->bell, BELL_ALL, BELL_ANNOUNCED, timeout_ns);
    doorbell_stay(header);
    return result;
}
