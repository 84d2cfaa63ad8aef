/* Rows of cells by key (see stash/group_table.h). */
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
/* Lines are fetched in pairs: a row of eight cells is one. */
#define LINE_PAIR 128u
/* The first chunk is small, for a bus that never has many groups; the others fill huge pages. */
#define FIRST_CHUNK ((size_t)32 << 10)
#define HUGE_PAGE ((size_t)2 << 20)
/* Rows whose serial is read ahead while `ages` is swept. */
#define SWEEP_AHEAD 16u

/* A row's number: which line pair of which chunk. */
#define PLACE_BITS 14u
_Static_assert(HUGE_PAGE / LINE_PAIR == 1u << PLACE_BITS, "a number has room for each place");
#define MOST_CHUNKS (UINT32_C(1) << (32u - PLACE_BITS))
#define FEW_CHUNKS 8u
/* An entry tells its home by half of a hash. */
#define MOST_ENTRIES (UINT64_C(1) << 32)

/* Zeroed memory; in huge pages where it is large and the kernel gives them. */
static void *take_memory(size_t bytes) {
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : LINE_PAIR;
    void *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (memory == NULL) {
        return NULL;
    }
    if (bytes >= HUGE_PAGE) {
        /* A hint: without it everything works, a little slower. */
        (void)madvise(memory, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    }
    memset(memory, 0, bytes);
    return memory;
}

bool rows_begin(struct rows *self) {
    memset(self, 0, sizeof *self);
    self->entries = take_memory(SMALLEST_INDEX * sizeof *self->entries);
    self->ages = take_memory(SMALLEST_AGES * sizeof *self->ages);
    if (self->entries == NULL || self->ages == NULL) {
        free(self->entries);
        free(self->ages);
        return false;
    }
    self->mask = SMALLEST_INDEX - 1;
    self->age_mask = SMALLEST_AGES - 1;
    self->bytes = SMALLEST_INDEX * sizeof *self->entries + SMALLEST_AGES * sizeof *self->ages;
    return true;
}

static struct row *row_at(const struct rows *self, uint32_t number) {
    uint8_t *chunk = self->chunks[number >> PLACE_BITS];
    size_t place = number & ((UINT32_C(1) << PLACE_BITS) - 1);
    return (struct row *)(void *)(chunk + place * LINE_PAIR);
}

static void free_row(struct rows *self, struct row *row) {
    row->serial = 0;
    if (row->key_bytes > ROW_INLINE_KEY) {
        self->bytes -= row->key_bytes;
        free(row->long_key);
    }
    uint8_t class = row->class;
    if (class == ROW_CLASSES) {
        self->bytes -= row->width * sizeof(void *);
        free(row->inline_cells[0]);
        class = 0;
    }
    row->next_free = self->free[class];
    self->free[class] = row;
}

void rows_end(struct rows *self) {
    for (uint64_t i = 0; self->entries != NULL && i <= self->mask; i++) {
        if (self->entries[i].number != 0) {
            free_row(self, row_at(self, self->entries[i].number));
        }
    }
    for (uint32_t i = 0; i < self->chunk_count; i++) {
        free(self->chunks[i]);
    }
    free(self->chunks);
    free(self->entries);
    free(self->ages);
    memset(self, 0, sizeof *self);
}

/* -- the index ---------------------------------------------------------------------------- */

static bool same_key(const struct row *row, const struct row_key *key) {
    return row->tag == key->tag && row->key_bytes == key->length && row->key_kind == key->kind &&
           memcmp(key->length > ROW_INLINE_KEY ? row->long_key : row->inline_key, key->bytes,
                  key->length) == 0;
}

void rows_expect_entry(const struct rows *self, uint64_t hash) {
    __builtin_prefetch(&self->entries[hash & self->mask], 1);
}

void rows_expect_row(const struct rows *self, uint64_t hash, uint32_t cell) {
    for (uint64_t i = hash & self->mask; self->entries[i].number != 0; i = (i + 1) & self->mask) {
        if (self->entries[i].hash == (uint32_t)hash) {
            const struct row *row = row_at(self, self->entries[i].number);
            __builtin_prefetch(row, 1);
            /* Only an address: a cell beyond the row is never read. */
            __builtin_prefetch((const char *)row->inline_cells + cell * sizeof(void *), 1);
            return;
        }
    }
}

struct row *rows_find(const struct rows *self, const struct row_key *key) {
    for (uint64_t i = key->hash & self->mask; self->entries[i].number != 0;
         i = (i + 1) & self->mask) {
        if (self->entries[i].hash == (uint32_t)key->hash) {
            struct row *row = row_at(self, self->entries[i].number);
            if (same_key(row, key)) {
                return row;
            }
        }
    }
    return NULL;
}

static void place(struct row_entry *entries, uint64_t mask, struct row_entry entry) {
    uint64_t i = entry.hash & mask;
    while (entries[i].number != 0) {
        i = (i + 1) & mask;
    }
    entries[i] = entry;
}

static bool grow_index(struct rows *self) {
    uint64_t room = (self->mask + 1) * 2;
    struct row_entry *grown = room > MOST_ENTRIES ? NULL : take_memory(room * sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    for (uint64_t i = 0; i <= self->mask; i++) {
        if (self->entries[i].number != 0) {
            place(grown, room - 1, self->entries[i]);
        }
    }
    self->bytes += (room - self->mask - 1) * sizeof *grown;
    free(self->entries);
    self->entries = grown;
    self->mask = room - 1;
    return true;
}

/* Closes the gap, so that no entry is cut off from where its hash says that it is. */
static void take_entry_out(struct rows *self, uint64_t gap) {
    struct row_entry *entries = self->entries;
    for (uint64_t i = (gap + 1) & self->mask; entries[i].number != 0; i = (i + 1) & self->mask) {
        uint64_t from_home = (i - entries[i].hash) & self->mask;
        uint64_t from_gap = (i - gap) & self->mask;
        if (from_home >= from_gap) {
            entries[gap] = entries[i];
            gap = i;
        }
    }
    entries[gap] = (struct row_entry){0, 0};
}

/* -- ages --------------------------------------------------------------------------------- */

static bool alive(const struct row_age *age) {
    return age->row->serial == age->serial;
}

static void sweep_ages(struct rows *self) {
    uint64_t to = self->age_first;
    for (uint64_t at = self->age_first; at < self->age_end; at++) {
        __builtin_prefetch(self->ages[(at + SWEEP_AHEAD) & self->age_mask].row);
        struct row_age age = self->ages[at & self->age_mask];
        if (alive(&age)) {
            self->ages[to++ & self->age_mask] = age;
        }
    }
    self->age_end = to;
}

static bool grow_ages(struct rows *self) {
    uint64_t room = self->age_mask + 1;
    struct row_age *grown = take_memory(2 * room * sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    for (uint64_t at = self->age_first; at < self->age_end; at++) {
        grown[at & (2 * room - 1)] = self->ages[at & self->age_mask];
    }
    free(self->ages);
    self->ages = grown;
    self->bytes += room * sizeof *grown;
    self->age_mask = 2 * room - 1;
    return true;
}

static bool add_age(struct rows *self, struct row *row) {
    uint64_t room = self->age_mask + 1;
    if (self->age_end - self->age_first == room) {
        sweep_ages(self);
        /* Grown while it is nearly full of the living, so that a sweep always frees many. */
        if ((self->age_end - self->age_first) * 4 > room * 3 && !grow_ages(self)) {
            return false;
        }
    }
    self->ages[self->age_end++ & self->age_mask] = (struct row_age){row, row->serial};
    return true;
}

struct row *rows_oldest(struct rows *self) {
    while (self->age_first < self->age_end) {
        const struct row_age *age = &self->ages[self->age_first & self->age_mask];
        if (alive(age)) {
            return age->row;
        }
        self->age_first++;
    }
    return NULL;
}

struct row *rows_next(const struct rows *self, uint64_t *at) {
    while (self->age_first + *at < self->age_end) {
        const struct row_age *age = &self->ages[(self->age_first + (*at)++) & self->age_mask];
        if (alive(age)) {
            return age->row;
        }
    }
    return NULL;
}

/* -- rows --------------------------------------------------------------------------------- */

static size_t row_bytes(uint32_t width) {
    size_t bytes = sizeof(struct row) + (size_t)width * sizeof(void *);
    return (bytes + LINE_PAIR - 1) / LINE_PAIR * LINE_PAIR;
}

static bool add_chunk(struct rows *self) {
    if (self->chunk_count == self->chunk_room) {
        uint32_t room = self->chunk_room == 0 ? FEW_CHUNKS : self->chunk_room * 2;
        uint8_t **grown = realloc(self->chunks, room * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        self->bytes += (room - self->chunk_room) * sizeof *grown;
        self->chunks = grown;
        self->chunk_room = room;
    }
    size_t size = self->chunk_count == 0 ? FIRST_CHUNK : HUGE_PAGE;
    uint8_t *chunk = self->chunk_count == MOST_CHUNKS ? NULL : take_memory(size);
    if (chunk == NULL) {
        return false;
    }
    /* No row is number 0. */
    self->chunk_used = self->chunk_count == 0 ? LINE_PAIR : 0;
    self->chunks[self->chunk_count++] = chunk;
    self->chunk_size = size;
    self->bytes += size;
    return true;
}

static struct row *cut_row(struct rows *self, size_t bytes) {
    if (self->chunk_size - self->chunk_used < bytes && !add_chunk(self)) {
        return NULL;
    }
    uint32_t chunk = self->chunk_count - 1;
    uint32_t number = (chunk << PLACE_BITS) + (uint32_t)(self->chunk_used / LINE_PAIR);
    self->chunk_used += bytes;
    struct row *row = row_at(self, number);
    row->number = number;
    return row;
}

/* A row without a key; its cells are NULL. */
static struct row *new_row(struct rows *self, uint32_t width) {
    uint8_t class = 0;
    while (class < ROW_CLASSES && (SMALLEST_CLASS << class) < width) {
        class++;
    }
    uint8_t pool = class < ROW_CLASSES ? class : 0;
    struct row *row = self->free[pool];
    if (row != NULL) {
        self->free[pool] = row->next_free;
    } else {
        row = cut_row(self, row_bytes(SMALLEST_CLASS << pool));
    }
    if (row == NULL) {
        return NULL;
    }
    row->class = class;
    row->width = width;
    row->missing = width;
    row->key_bytes = 0;
    memset(row->inline_cells, 0, (SMALLEST_CLASS << pool) * sizeof(void *));
    if (class == ROW_CLASSES) {
        /* Pages that nobody touches cost nothing: a wide row may stay nearly empty. */
        row->inline_cells[0] = calloc(width, sizeof(void *));
        if (row->inline_cells[0] == NULL) {
            row->class = 0;
            free_row(self, row);
            return NULL;
        }
        self->bytes += width * sizeof(void *);
    }
    return row;
}

static bool copy_key(struct rows *self, struct row *row, const struct row_key *key) {
    uint8_t *to = row->inline_key;
    if (key->length > ROW_INLINE_KEY) {
        to = malloc(key->length);
        if (to == NULL) {
            return false;
        }
        row->long_key = to;
        self->bytes += key->length;
    }
    memcpy(to, key->bytes, key->length);
    row->key_bytes = key->length;
    row->key_kind = key->kind;
    row->tag = key->tag;
    return true;
}

struct row *rows_insert(struct rows *self, const struct row_key *key, uint32_t width,
                        double born_s) {
    if ((self->count + 1) * 8 > (self->mask + 1) * 5 && !grow_index(self)) {
        return NULL;
    }
    struct row *row = new_row(self, width);
    if (row == NULL) {
        return NULL;
    }
    if (!copy_key(self, row, key)) {
        free_row(self, row);
        return NULL;
    }
    row->born_s = born_s;
    row->serial = ++self->serial;
    if (!add_age(self, row)) {
        free_row(self, row);
        return NULL;
    }
    place(self->entries, self->mask, (struct row_entry){(uint32_t)key->hash, row->number});
    self->count++;
    return row;
}

void rows_remove(struct rows *self, struct row *row, uint64_t hash) {
    for (uint64_t i = hash & self->mask; self->entries[i].number != 0; i = (i + 1) & self->mask) {
        if (self->entries[i].number == row->number) {
            take_entry_out(self, i);
            break;
        }
    }
    self->count--;
    free_row(self, row);
}
