/* The hash set of reader.h: open addressing, never more than half full. */
#include "reader.h"

#include <stdlib.h>

#define SMALLEST_ROOM 256u

static uint64_t mix(uint64_t producer_id, uint64_t sequence) {
    uint64_t h = producer_id * UINT64_C(0x9E3779B97F4A7C15) ^ sequence;
    h *= UINT64_C(0xBF58476D1CE4E5B9);
    return h ^ (h >> 29);
}

static struct moved_record *place_of(const struct moved_set *self, uint64_t producer_id,
                                     uint64_t sequence) {
    uint64_t mask = self->room - 1;
    for (uint64_t i = mix(producer_id, sequence) & mask;; i = (i + 1) & mask) {
        struct moved_record *at = &self->records[i];
        if (at->producer_id == 0 ||
            (at->producer_id == producer_id && at->sequence == sequence)) {
            return at;
        }
    }
}

static bool grow(struct moved_set *self) {
    struct moved_set bigger = *self;
    bigger.room = self->room ? self->room * 2 : SMALLEST_ROOM;
    bigger.records = calloc(bigger.room, sizeof *bigger.records);
    if (bigger.records == NULL) {
        return false;
    }
    for (uint64_t i = 0; i < self->room; i++) {
        struct moved_record *entry = &self->records[i];
        if (entry->producer_id != 0) {
            *place_of(&bigger, entry->producer_id, entry->sequence) = *entry;
        }
    }
    free(self->records);
    *self = bigger;
    return true;
}

bool moved_set_insert(struct moved_set *self, uint64_t producer_id, uint64_t sequence) {
    if (self->count * 2 >= self->room && !grow(self)) {
        return false;
    }
    *place_of(self, producer_id, sequence) = (struct moved_record){producer_id, sequence};
    self->count++;
    return true;
}

bool moved_set_contains(const struct moved_set *self, uint64_t producer_id, uint64_t sequence) {
    return self->room > 0 && producer_id != 0 &&
           place_of(self, producer_id, sequence)->producer_id != 0;
}

void moved_set_clear(struct moved_set *self) {
    free(self->records);
    *self = (struct moved_set){0};
}
