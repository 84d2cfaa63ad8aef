/* The part of the segment that is about splits, and about groups that ended early: layout.h includes
 * this, and nothing else does. */
#ifndef SHMBUS_RING_LAYOUT_SPLITS_H
#define SHMBUS_RING_LAYOUT_SPLITS_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Splits of a bus, "train" and others: a label each in its table. Few enough for a counter each. */
#define SHMBUS_MAX_SPLITS 16u
/* The split of records that nobody gave one: what is trained on. */
#define SHMBUS_SPLIT_TRAIN 0u
#define SHMBUS_SPLIT_TRAIN_LABEL "train"
/* Of a split's label, in UTF-8; with its length it fills four words. */
#define SHMBUS_SPLIT_LABEL_BYTES 31u
/* The groups that ended last without all of their samples: what their workers may ask about. */
#define SHMBUS_CANCELLED 1024u

/* A split: its label, and the ledger of its records. The first word of the label begins with the
 * length, so a word that belongs to the label is never 0, and one that is 0 is not written yet.
 *
 * Offset  Size  Field          Written by       Read by  Order
 *      0    32  label          who needs it     all      CAS from 0, word by word
 *     32     8  acked          collector        all      relaxed; exact through the intent
 *     40     8  dropped        collector        all      the same
 *     48     8  stashed        collector        all      relaxed, for messages only
 *     56     4  ready_groups   collector        all      the same
 *     60     4  open_groups    collector        all      the same
 */
#define SHMBUS_SPLIT_LABEL_WORDS 4u
struct split_entry {
    alignas(64) _Atomic uint64_t label[SHMBUS_SPLIT_LABEL_WORDS];
    _Atomic uint64_t acked;
    _Atomic uint64_t dropped;
    _Atomic uint64_t stashed;
    _Atomic uint32_t ready_groups;
    _Atomic uint32_t open_groups;
};
#define SHMBUS_SPLITS_BYTES ((uint64_t)SHMBUS_MAX_SPLITS * sizeof(struct split_entry))
_Static_assert(sizeof(struct split_entry) == 64, "a cache line a split");
_Static_assert(SHMBUS_SPLIT_LABEL_BYTES + 1 == SHMBUS_SPLIT_LABEL_WORDS * 8, "layout");
_Static_assert(offsetof(struct split_entry, acked) == 32, "layout");

#endif
