/* Rows of cells by key: a hash table laid out for many more rows than a cache holds.
 *
 * A row has a key, a width, and that many cells; it leaves the table when it is taken out, filled or
 * not. What a cell points to, and what a key means, is the caller's.
 *
 * Invariants:
 *  - An index entry holds half of the hash, so a key that is not there costs one cache line, and one
 *    that is there costs three: entry, row, cell. Each can be asked for ahead of its use
 *    (rows_expect), which is what keeps a million rows from costing much more than a thousand.
 *  - Entries name rows by number, in eight bytes: what a million rows cost beyond a thousand is
 *    mostly the walks to their pages, and a small index has few.
 *  - The index is never more than five eighths full, and has no tombstones.
 *  - `ages` names the rows in the order of their birth; entries of rows that are gone are told by
 *    their serial, and skipped. It grows only while more than three quarters of it are alive.
 */
#ifndef SHMBUS_STASH_GROUP_TABLE_H
#define SHMBUS_STASH_GROUP_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ROW_INLINE_KEY 24u
/* Rows of up to 8, 16, 32, 64, 128 and 256 cells come from pools, which never shrink while the table
 * lives; the cells of wider ones are allocated one by one. */
#define ROW_CLASSES 6u

struct row {
    uint64_t serial; /* 0 while it is in no table */
    double born_s;
    int64_t tag;
    uint32_t width;
    uint32_t missing;
    uint16_t key_bytes;
    uint8_t key_kind;
    uint8_t class; /* of its pool; ROW_CLASSES: its cells lie elsewhere */
    uint32_t number; /* where it lies: chunk, and place in it; never 0 */
    union {
        uint8_t inline_key[ROW_INLINE_KEY];
        uint8_t *long_key;
        struct row *next_free;
    };
    void *inline_cells[]; /* or, for a wide row, in the first of them where its cells lie */
};
_Static_assert(offsetof(struct row, inline_cells) == 64, "two cache lines hold a row of eight cells");

static inline void **row_cells(struct row *row) {
    return row->class == ROW_CLASSES ? (void **)row->inline_cells[0] : row->inline_cells;
}

/* Keys are equal where kind, tag and bytes are; equal keys have equal hashes. */
struct row_key {
    const uint8_t *bytes;
    uint64_t hash;
    int64_t tag;
    uint16_t length;
    uint8_t kind;
};

struct row_entry {
    uint32_t hash; /* its lower half */
    uint32_t number; /* of the row; 0: none */
};

struct row_age {
    struct row *row;
    uint64_t serial;
};

struct rows {
    struct row_entry *entries;
    uint64_t mask; /* entries - 1 */
    uint64_t count;
    uint64_t serial; /* of the row born last */
    struct row_age *ages;
    uint64_t age_mask, age_first, age_end;
    struct row *free[ROW_CLASSES];
    uint8_t **chunks;
    uint32_t chunk_count, chunk_room;
    size_t chunk_used, chunk_size; /* of the newest */
    size_t bytes; /* of index, ages, chunks, large rows and long keys */
};

bool rows_begin(struct rows *self);
/* The cells are the caller's to let go first. */
void rows_end(struct rows *self);

/* Asks for the memory that a find will need: first the entry, later the row and the cell. */
void rows_expect_entry(const struct rows *self, uint64_t hash);
void rows_expect_row(const struct rows *self, uint64_t hash, uint32_t cell);

struct row *rows_find(const struct rows *self, const struct row_key *key);
/* A key that is not there yet; NULL when memory is short. All cells are NULL. */
struct row *rows_insert(struct rows *self, const struct row_key *key, uint32_t width,
                        double born_s);
/* Takes a row out and forgets it; its cells are read before. */
void rows_remove(struct rows *self, struct row *row, uint64_t hash);

/* The row that was born first; NULL when there is none. */
struct row *rows_oldest(struct rows *self);
/* The rows by age: *at begins at 0; NULL at the end. Nothing may change meanwhile. */
struct row *rows_next(const struct rows *self, uint64_t *at);

#endif
