/* The hash table of group_table.h: index, ages, memory. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise */
#endif
#include "group_table.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALLEST_INDEX 64u
#define SMALLEST_AGES 64u
#define SMALLEST_CLASS 8u
/* The hardware fetches lines in pairs: an entry of eight cells fills a pair. */
#define LINE_PAIR 128u
/* A small first chunk, for a bus with few groups; later chunks fill huge pages. */
#define FIRST_CHUNK ((size_t)32 << 10)
#define HUGE_PAGE ((size_t)2 << 20)
/* Prefetch distance, in entries, for serials during a sweep of `ages`. */
#define SWEEP_AHEAD 16u

/* An entry's number: chunk, and line pair in the chunk. */
#define PLACE_BITS 14u
_Static_assert(HUGE_PAGE / LINE_PAIR == 1u << PLACE_BITS, "a number has room for each place");
#define MOST_CHUNKS (UINT32_C(1) << (32u - PLACE_BITS))
#define FEW_CHUNKS 8u
/* A bucket finds its home from half of a hash. */
#define MOST_BUCKETS (UINT64_C(1) << 32)

/* Zeroed memory; large requests in huge pages if available. */
static void *take_memory(size_t bytes) {
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : LINE_PAIR;
    void *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (memory == NULL) {
        return NULL;
    }
    if (bytes >= HUGE_PAGE) {
        /* A hint: without huge pages the table merely runs slower. */
        (void)madvise(memory, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    }
    memset(memory, 0, bytes);
    return memory;
}

bool group_table_begin(struct group_table *self) {
    memset(self, 0, sizeof *self);
    self->buckets = take_memory(SMALLEST_INDEX * sizeof *self->buckets);
    self->ages = take_memory(SMALLEST_AGES * sizeof *self->ages);
    if (self->buckets == NULL || self->ages == NULL) {
        free(self->buckets);
        free(self->ages);
        return false;
    }
    self->mask = SMALLEST_INDEX - 1;
    self->age_mask = SMALLEST_AGES - 1;
    return true;
}

static struct group_entry *entry_at(const struct group_table *self, uint32_t number) {
    uint8_t *chunk = self->chunks[number >> PLACE_BITS];
    size_t place = number & ((UINT32_C(1) << PLACE_BITS) - 1);
    return (struct group_entry *)(void *)(chunk + place * LINE_PAIR);
}

static void free_entry(struct group_table *self, struct group_entry *entry) {
    entry->serial = 0;
    if (entry->key_bytes > ENTRY_INLINE_KEY) {
        free(entry->long_key);
    }
    uint8_t class = entry->class;
    if (class == ENTRY_CLASSES) {
        free(entry->inline_cells[0]);
        class = 0;
    }
    entry->next_free = self->free[class];
    self->free[class] = entry;
}

void group_table_end(struct group_table *self) {
    for (uint64_t i = 0; self->buckets != NULL && i <= self->mask; i++) {
        if (self->buckets[i].number != 0) {
            free_entry(self, entry_at(self, self->buckets[i].number));
        }
    }
    for (uint32_t i = 0; i < self->chunk_count; i++) {
        free(self->chunks[i]);
    }
    free(self->chunks);
    free(self->buckets);
    free(self->ages);
    memset(self, 0, sizeof *self);
}

/* -- the index ---------------------------------------------------------------------------- */

static bool same_key(const struct group_entry *entry, const struct group_key *key) {
    return entry->tag == key->tag && entry->key_bytes == key->length &&
           entry->key_kind == key->kind &&
           memcmp(key->length > ENTRY_INLINE_KEY ? entry->long_key : entry->inline_key, key->bytes,
                  key->length) == 0;
}

void group_table_expect_bucket(const struct group_table *self, uint64_t hash) {
    __builtin_prefetch(&self->buckets[hash & self->mask], 1);
}

void group_table_expect_entry(const struct group_table *self, uint64_t hash, uint32_t cell) {
    for (uint64_t i = hash & self->mask; self->buckets[i].number != 0; i = (i + 1) & self->mask) {
        if (self->buckets[i].hash == (uint32_t)hash) {
            const struct group_entry *entry = entry_at(self, self->buckets[i].number);
            __builtin_prefetch(entry, 1);
            /* Only an address: the prefetch never reads a cell beyond the entry. */
            __builtin_prefetch((const char *)entry->inline_cells + cell * sizeof(void *), 1);
            return;
        }
    }
}

struct group_entry *group_table_find(const struct group_table *self, const struct group_key *key) {
    for (uint64_t i = key->hash & self->mask; self->buckets[i].number != 0;
         i = (i + 1) & self->mask) {
        if (self->buckets[i].hash == (uint32_t)key->hash) {
            struct group_entry *entry = entry_at(self, self->buckets[i].number);
            if (same_key(entry, key)) {
                return entry;
            }
        }
    }
    return NULL;
}

static void place(struct group_bucket *buckets, uint64_t mask, struct group_bucket bucket) {
    uint64_t i = bucket.hash & mask;
    while (buckets[i].number != 0) {
        i = (i + 1) & mask;
    }
    buckets[i] = bucket;
}

static bool grow_index(struct group_table *self) {
    uint64_t room = (self->mask + 1) * 2;
    struct group_bucket *grown = room > MOST_BUCKETS ? NULL : take_memory(room * sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    for (uint64_t i = 0; i <= self->mask; i++) {
        if (self->buckets[i].number != 0) {
            place(grown, room - 1, self->buckets[i]);
        }
    }
    free(self->buckets);
    self->buckets = grown;
    self->mask = room - 1;
    return true;
}

/* Closes the gap, to keep every bucket reachable from the place named by its hash. */
static void close_gap(struct group_table *self, uint64_t gap) {
    struct group_bucket *buckets = self->buckets;
    for (uint64_t i = (gap + 1) & self->mask; buckets[i].number != 0; i = (i + 1) & self->mask) {
        uint64_t from_home = (i - buckets[i].hash) & self->mask;
        uint64_t from_gap = (i - gap) & self->mask;
        if (from_home >= from_gap) {
            buckets[gap] = buckets[i];
            gap = i;
        }
    }
    buckets[gap] = (struct group_bucket){0, 0};
}

/* -- ages --------------------------------------------------------------------------------- */

static bool alive(const struct group_age *age) {
    return age->entry->serial == age->serial;
}

static void sweep_ages(struct group_table *self) {
    uint64_t to = self->age_first;
    for (uint64_t at = self->age_first; at < self->age_end; at++) {
        __builtin_prefetch(self->ages[(at + SWEEP_AHEAD) & self->age_mask].entry);
        struct group_age age = self->ages[at & self->age_mask];
        if (alive(&age)) {
            self->ages[to++ & self->age_mask] = age;
        }
    }
    self->age_end = to;
}

static bool grow_ages(struct group_table *self) {
    uint64_t room = self->age_mask + 1;
    struct group_age *grown = take_memory(2 * room * sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    for (uint64_t at = self->age_first; at < self->age_end; at++) {
        grown[at & (2 * room - 1)] = self->ages[at & self->age_mask];
    }
    free(self->ages);
    self->ages = grown;
    self->age_mask = 2 * room - 1;
    return true;
}

static bool add_age(struct group_table *self, struct group_entry *entry) {
    uint64_t room = self->age_mask + 1;
    if (self->age_end - self->age_first == room) {
        sweep_ages(self);
        /* Grow only if more than three quarters are alive: a sweep then frees many. */
        if ((self->age_end - self->age_first) * 4 > room * 3 && !grow_ages(self)) {
            return false;
        }
    }
    self->ages[self->age_end++ & self->age_mask] = (struct group_age){entry, entry->serial};
    return true;
}

struct group_entry *group_table_oldest(struct group_table *self) {
    while (self->age_first < self->age_end) {
        const struct group_age *age = &self->ages[self->age_first & self->age_mask];
        if (alive(age)) {
            return age->entry;
        }
        self->age_first++;
    }
    return NULL;
}

struct group_entry *group_table_next(const struct group_table *self, uint64_t *at) {
    while (self->age_first + *at < self->age_end) {
        const struct group_age *age = &self->ages[(self->age_first + (*at)++) & self->age_mask];
        if (alive(age)) {
            return age->entry;
        }
    }
    return NULL;
}

/* -- entries ------------------------------------------------------------------------------ */

static size_t entry_bytes(uint32_t width) {
    size_t bytes = sizeof(struct group_entry) + (size_t)width * sizeof(void *);
    return (bytes + LINE_PAIR - 1) / LINE_PAIR * LINE_PAIR;
}

static bool add_chunk(struct group_table *self) {
    if (self->chunk_count == self->chunk_room) {
        uint32_t room = self->chunk_room == 0 ? FEW_CHUNKS : self->chunk_room * 2;
        uint8_t **grown = realloc(self->chunks, room * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        self->chunks = grown;
        self->chunk_room = room;
    }
    size_t size = self->chunk_count == 0 ? FIRST_CHUNK : HUGE_PAGE;
    uint8_t *chunk = self->chunk_count == MOST_CHUNKS ? NULL : take_memory(size);
    if (chunk == NULL) {
        return false;
    }
    /* Entry numbers start at 1. */
    self->chunk_used = self->chunk_count == 0 ? LINE_PAIR : 0;
    self->chunks[self->chunk_count++] = chunk;
    self->chunk_size = size;
    return true;
}

static struct group_entry *cut_entry(struct group_table *self, size_t bytes) {
    if (self->chunk_size - self->chunk_used < bytes && !add_chunk(self)) {
        return NULL;
    }
    uint32_t chunk = self->chunk_count - 1;
    uint32_t number = (chunk << PLACE_BITS) + (uint32_t)(self->chunk_used / LINE_PAIR);
    self->chunk_used += bytes;
    struct group_entry *entry = entry_at(self, number);
    entry->number = number;
    return entry;
}

/* Returns an entry without a key; cells start as NULL. */
static struct group_entry *new_entry(struct group_table *self, uint32_t width, uint32_t need) {
    uint8_t class = 0;
    while (class < ENTRY_CLASSES && (SMALLEST_CLASS << class) < width) {
        class++;
    }
    uint8_t pool = class < ENTRY_CLASSES ? class : 0;
    struct group_entry *entry = self->free[pool];
    if (entry != NULL) {
        self->free[pool] = entry->next_free;
    } else {
        entry = cut_entry(self, entry_bytes(SMALLEST_CLASS << pool));
    }
    if (entry == NULL) {
        return NULL;
    }
    entry->class = class;
    entry->width = (uint16_t)width;
    entry->need = (uint16_t)need;
    entry->missing = need;
    entry->key_bytes = 0;
    memset(entry->inline_cells, 0, (SMALLEST_CLASS << pool) * sizeof(void *));
    if (class == ENTRY_CLASSES) {
        /* Untouched pages cost nothing: a wide entry may stay nearly empty. */
        entry->inline_cells[0] = calloc(width, sizeof(void *));
        if (entry->inline_cells[0] == NULL) {
            entry->class = 0;
            free_entry(self, entry);
            return NULL;
        }
    }
    return entry;
}

static bool copy_key(struct group_entry *entry, const struct group_key *key) {
    uint8_t *to = entry->inline_key;
    if (key->length > ENTRY_INLINE_KEY) {
        to = malloc(key->length);
        if (to == NULL) {
            return false;
        }
        entry->long_key = to;
    }
    memcpy(to, key->bytes, key->length);
    entry->key_bytes = key->length;
    entry->key_kind = key->kind;
    entry->tag = key->tag;
    return true;
}

struct group_entry *group_table_insert(struct group_table *self, const struct group_key *key,
                                       uint32_t width, uint32_t need, double born_s) {
    if ((self->count + 1) * 8 > (self->mask + 1) * 5 && !grow_index(self)) {
        return NULL;
    }
    struct group_entry *entry = new_entry(self, width, need);
    if (entry == NULL) {
        return NULL;
    }
    if (!copy_key(entry, key)) {
        free_entry(self, entry);
        return NULL;
    }
    entry->born_s = born_s;
    entry->serial = ++self->serial;
    if (!add_age(self, entry)) {
        free_entry(self, entry);
        return NULL;
    }
    place(self->buckets, self->mask, (struct group_bucket){(uint32_t)key->hash, entry->number});
    self->count++;
    return entry;
}

void group_table_remove(struct group_table *self, struct group_entry *entry, uint64_t hash) {
    for (uint64_t i = hash & self->mask; self->buckets[i].number != 0; i = (i + 1) & self->mask) {
        if (self->buckets[i].number == entry->number) {
            close_gap(self, i);
            break;
        }
    }
    self->count--;
    free_entry(self, entry);
}
