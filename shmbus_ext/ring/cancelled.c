/* The list of cancelled.h: a ring of hashes with a count. */
#include "cancelled.h"

#include <string.h>

/* The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): each bit depends on each. */
static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94D049BB133111EB);
    return value ^ (value >> 31);
}

uint64_t group_key_hash(const char *id, uint32_t bytes, int64_t round, uint32_t split) {
    uint64_t hash = mix((uint64_t)round ^ mix(((uint64_t)split << 32) | bytes));
    for (uint32_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, id + at, bytes - at < 8 ? bytes - at : 8);
        hash = mix(hash ^ word);
    }
    return hash | 1;
}

void cancelled_add(struct segment *segment, uint64_t key_hash) {
    _Atomic uint64_t *count = &segment->header->cancelled_count;
    uint64_t before = atomic_load_explicit(count, memory_order_relaxed);
    atomic_store_explicit(&segment->cancelled[before % SHMBUS_CANCELLED], key_hash,
                          memory_order_relaxed);
    /* SYNC: group-cancelled. A count that is seen has its entries. */
    atomic_store_explicit(count, before + 1, memory_order_release);
}

bool cancelled_has(const struct segment *segment, uint64_t key_hash) {
    /* SYNC: group-cancelled. */
    uint64_t count =
        atomic_load_explicit(&segment->header->cancelled_count, memory_order_acquire);
    uint64_t entries = count < SHMBUS_CANCELLED ? count : SHMBUS_CANCELLED;
    uint64_t found = 0;
    for (uint64_t i = 0; i < entries; i++) {
        uint64_t entry = atomic_load_explicit(&segment->cancelled[i], memory_order_relaxed);
        found |= (uint64_t)(entry == key_hash);
    }
    return found != 0;
}
