/* Writing a version into a pool: by one publisher, or by several ranks of which rank 0 is it.
 *
 * Invariants: the newest whole version is never overwritten, whoever dies. A slot is written under
 * its exclusive lock, or by a rank that holds its piece of it; nobody takes a slot while any of
 * these is held. `latest` is stored last, by the publisher alone, after the slot is unlocked. */
#ifndef SHMBUS_POOL_PUBLISH_H
#define SHMBUS_POOL_PUBLISH_H

#include <stdbool.h>
#include <stdint.h>

#include "pool/pool.h"

/* What a version is, from its publisher; text and meta are copied. */
struct version_facts {
    int64_t version;
    uint64_t bytes;
    uint64_t meta_bytes;
    const void *meta;
    const char *text;
    uint32_t ranks;
    bool patches; /* whether ranks may make patches against the newest version */
};

/* The publisher takes a slot: SHARED_NOTHING where each is the newest or held by somebody. From then
 * on the other ranks may write into it. */
enum shared_status publish_begin(struct pool *self, const struct version_facts *facts,
                               uint32_t *slot, uint64_t *sequence);
/* All pieces are there: readers get the version. digests: blocks whose digest lies in the slot. */
void publish_finish(struct pool *self, uint32_t slot, uint64_t sequence, uint32_t digests);
/* The version is given up: what was newest stays so, and the ranks learn it. The slot is kept until
 * nobody in this process can write it any more. */
void publish_give_up(struct pool *self);
void publish_let_go(struct pool *self, uint32_t slot);
void publish_count_skipped(struct pool *self);

/* A rank joins the version that is being written; row says which it is. SHARED_NOTHING where there is
 * none that it has not written. */
enum shared_status publish_join(struct pool *self, uint32_t *slot, struct slot_row *row);
/* Its piece is written, or cannot be, which leaves the version to fail. The piece is kept until
 * nobody in this process can write it any more. */
void publish_piece_done(struct pool *self, uint64_t sequence);
void publish_piece_failed(struct pool *self, uint64_t sequence, const char *error);
void publish_piece_let_go(struct pool *self, uint32_t slot);
/* Whether a joined version became whole: SHARED_OK; SHARED_NOTHING for not yet; SHARED_GONE when its
 * publisher gave it up or ended. */
enum shared_status publish_outcome(const struct pool *self, uint64_t sequence);

enum piece_state {
    PIECE_ABSENT = 0, /* the rank is not there, and has not begun */
    PIECE_AWAITED,
    PIECE_BEGUN,
    PIECE_DONE,
    PIECE_FAILED,
    PIECE_DEAD, /* it ended while it wrote */
};
/* How far a rank is with a version, as the publisher sees it. */
enum piece_state publish_piece_state(const struct pool *self, uint64_t sequence, uint32_t rank);

#endif
