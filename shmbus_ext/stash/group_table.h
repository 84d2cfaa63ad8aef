/* The group table: the stash's incomplete groups by key, laid out for more groups than a cache
 * holds.
 *
 * A group's entry holds a key, a width, and `width` cells, one for every sample; `need` cells fill
 * the entry. An entry leaves the table by removal, filled or not. The caller defines the contents
 * of cells and the meaning of keys.
 *
 * Invariants:
 *  - A bucket of the index holds half of the hash: a missing key costs one cache line, a present
 *    key three: bucket, entry, cell. Prefetches (group_table_expect_*) for each line keep the cost
 *    for a million groups near the cost for a thousand.
 *  - Buckets name entries by number, in eight bytes: the extra cost of a million entries comes
 *    mostly from page walks, and a small index spans few pages.
 *  - The index stays at most five eighths full, and without tombstones.
 *  - `ages` lists the entries in order of birth. A sweep recognises removed entries by their
 *    serial, and skips them. `ages` grows only while more than three quarters of its entries are
 *    alive. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENTRY_INLINE_KEY 24u
/* Entries of up to 8, 16, 32, 64, 128 and 256 cells come from pools, which never shrink during the
 * table's life; the cells of a wider entry are allocated separately. */
#define ENTRY_CLASSES 6u

struct group_entry {
    uint64_t serial; /* 0: outside of a table */
    double born_s;
    int64_t tag;
    uint16_t width;
    uint16_t need;    /* number of cells that fill the entry */
    uint32_t missing; /* of those */
    uint16_t key_bytes;
    uint8_t key_kind; /* also the caller's: a part of the key */
    uint8_t class; /* pool index; ENTRY_CLASSES: separately allocated cells */
    uint32_t number; /* location: chunk, and place in the chunk; never 0 */
    union {
        uint8_t inline_key[ENTRY_INLINE_KEY];
        uint8_t *long_key;
        struct group_entry *next_free;
    };
    void *inline_cells[]; /* or, for a wide entry, the address of its cells in inline_cells[0] */
};
_Static_assert(offsetof(struct group_entry, inline_cells) == 64,
               "two cache lines hold an entry of eight cells");

static inline void **group_entry_cells(struct group_entry *entry) {
    return entry->class == ENTRY_CLASSES ? (void **)entry->inline_cells[0] : entry->inline_cells;
}

/* Keys are equal with equal kind, tag and bytes; equal keys give equal hashes. */
struct group_key {
    const uint8_t *bytes;
    uint64_t hash;
    int64_t tag;
    uint16_t length;
    uint8_t kind;
};

struct group_bucket {
    uint32_t hash; /* lower half of the hash */
    uint32_t number; /* number of the entry; 0: empty */
};

struct group_age {
    struct group_entry *entry;
    uint64_t serial;
};

struct group_table {
    struct group_bucket *buckets;
    uint64_t mask; /* buckets - 1 */
    uint64_t count;
    uint64_t serial; /* of the entry born last */
    struct group_age *ages;
    uint64_t age_mask, age_first, age_end;
    struct group_entry *free[ENTRY_CLASSES];
    uint8_t **chunks;
    uint32_t chunk_count, chunk_room;
    size_t chunk_used, chunk_size; /* of the newest */
};

bool group_table_begin(struct group_table *self);
/* The caller releases the cells first. */
void group_table_end(struct group_table *self);

/* Prefetches what a find will need: first the bucket, later the entry and the cell. */
void group_table_expect_bucket(const struct group_table *self, uint64_t hash);
void group_table_expect_entry(const struct group_table *self, uint64_t hash, uint32_t cell);

struct group_entry *group_table_find(const struct group_table *self, const struct group_key *key);
/* Inserts a new key; NULL if out of memory. Cells start as NULL. */
struct group_entry *group_table_insert(struct group_table *self, const struct group_key *key,
                                       uint32_t width, uint32_t need, double born_s);
/* Removes an entry; the caller reads its cells before. */
void group_table_remove(struct group_table *self, struct group_entry *entry, uint64_t hash);

/* The oldest entry; NULL if the table is empty. */
struct group_entry *group_table_oldest(struct group_table *self);
/* The entries by age: *at begins at 0; NULL at the end. Nothing may change between the calls. */
struct group_entry *group_table_next(const struct group_table *self, uint64_t *at);
