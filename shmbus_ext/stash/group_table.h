/* The group table: the stash's incomplete groups by key, laid out for many more of them than a
 * cache holds.
 *
 * A group's entry has a key, a width, and that many cells, one a sample; `need` of them fill it. It
 * leaves the table when it is taken out, filled or not. What a cell points to, and what a key means, is the caller's.
 *
 * Invariants:
 *  - A bucket of the index holds half of the hash, so a missing key costs one cache line, and one
 *    that is there costs three: bucket, entry, cell. Each can be prefetched (group_table_expect_*),
 *    which keeps a million groups from costing much more than a thousand.
 *  - Buckets name entries by number, in eight bytes: what a million entries cost beyond a thousand
 *    is mostly the walks to their pages, and a small index has few.
 *  - The index is never more than five eighths full, and has no tombstones.
 *  - `ages` names the entries in the order of their birth. An entry that is gone is known by its
 *    serial, and skipped. `ages` grows only while more than three quarters of it are alive.
 */
#ifndef SHMBUS_STASH_GROUP_TABLE_H
#define SHMBUS_STASH_GROUP_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENTRY_INLINE_KEY 24u
/* Entries of up to 8, 16, 32, 64, 128 and 256 cells come from pools, which never shrink while the
 * table lives; the cells of a wider one are allocated on their own. */
#define ENTRY_CLASSES 6u

struct group_entry {
    uint64_t serial; /* 0 while it is in no table */
    double born_s;
    int64_t tag;
    uint16_t width;
    uint16_t need;    /* cells that fill it */
    uint32_t missing; /* of those */
    uint16_t key_bytes;
    uint8_t key_kind; /* also the caller's: a part of the key */
    uint8_t class; /* of its pool; ENTRY_CLASSES: its cells lie elsewhere */
    uint32_t number; /* where it lies: chunk, and place in it; never 0 */
    union {
        uint8_t inline_key[ENTRY_INLINE_KEY];
        uint8_t *long_key;
        struct group_entry *next_free;
    };
    void *inline_cells[]; /* or, for a wide entry, in the first of them where its cells lie */
};
_Static_assert(offsetof(struct group_entry, inline_cells) == 64,
               "two cache lines hold an entry of eight cells");

static inline void **group_entry_cells(struct group_entry *entry) {
    return entry->class == ENTRY_CLASSES ? (void **)entry->inline_cells[0] : entry->inline_cells;
}

/* Keys are equal where kind, tag and bytes are; equal keys have equal hashes. */
struct group_key {
    const uint8_t *bytes;
    uint64_t hash;
    int64_t tag;
    uint16_t length;
    uint8_t kind;
};

struct group_bucket {
    uint32_t hash; /* its lower half */
    uint32_t number; /* of the entry; 0: none */
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
    size_t bytes; /* of index, ages, chunks, wide entries and long keys */
};

bool group_table_begin(struct group_table *self);
/* The cells are the caller's to let go first. */
void group_table_end(struct group_table *self);

/* Prefetches what a find will need: first the bucket, later the entry and the cell. */
void group_table_expect_bucket(const struct group_table *self, uint64_t hash);
void group_table_expect_entry(const struct group_table *self, uint64_t hash, uint32_t cell);

struct group_entry *group_table_find(const struct group_table *self, const struct group_key *key);
/* A key that is not there yet; NULL when memory is short. All cells are NULL. */
struct group_entry *group_table_insert(struct group_table *self, const struct group_key *key,
                                       uint32_t width, uint32_t need, double born_s);
/* Takes an entry out and forgets it; its cells are the caller's to read before. */
void group_table_remove(struct group_table *self, struct group_entry *entry, uint64_t hash);

/* The entry that was born first; NULL when there is none. */
struct group_entry *group_table_oldest(struct group_table *self);
/* The entries by age: *at begins at 0; NULL at the end. Nothing may change between the calls. */
struct group_entry *group_table_next(const struct group_table *self, uint64_t *at);

#endif
