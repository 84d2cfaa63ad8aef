/* The ring as the subject of the explorer.
 *
 * segment.c, which does nothing between processes but to lock, keeps the kernel's locks.
 * observe.c has notes that nothing is decided by: no place to switch actors at.
 *
 * hooked: attach count doorbell extents intent_log lead moved_set reader reclaim record
 * hooked: relay_journal recovery request_feed request_row requests retry_table writer
 * plain: declared_schema observe request_parts splits
 * kernel: segment
 *
 * ghost.c    promises: told by the scripts, checked at each step and at each end
 * ghost_retry.c  promises of retry requests
 * actors.c   steps of a producer, a collector and the auditor
 * admission.c  steps of puts and workers under a bound on the lead
 * prompts.c  steps of a feeder and workers with the request lane
 * retries.c  steps of the collector and the producers of retry requests
 * scenarios.c  the scenarios, and the segment */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "ring/reader.h"

enum {
    MAX_LIVES = 16,
    MAX_RECORDS = 8, /* of a producer's life */
    MAX_SLOTS = 4,
    MAX_ACK_SETS = 32,
    MAX_REQUESTS = 8,
    /* Places of locks; in front of them each slot's. */
    COLLECTOR_LOCK = MAX_SLOTS,
    FEEDER_LOCK,
};

enum record_fate { R_NONE = 0, R_OPEN, R_BEGUN, R_COMMITTED, R_ABORTED };

enum ack_stage { ACK_NONE = 0, ACK_BEGUN, ACK_DONE };

struct ghost_record {
    uint8_t fate;
    uint8_t acked; /* enum ack_stage */
    uint8_t ack_set;
    uint8_t moving;
    uint8_t owner; /* process */
    uint8_t before; /* earlier records of its producer, by bit */
    uint16_t delivered_to; /* collectors, by bit */
    uint32_t from, to;     /* bytes of the segment */
};

/* A request is a number from 1, 0 for none; a process counts from 1 here. */
struct ghost_retry {
    uint8_t asked;     /* requests so far */
    uint8_t published; /* the last request to arrive in the table */
    uint8_t current;   /* request of the row, for a claimant */
    uint8_t claimed[5]; /* request of the row at the process's claim */
    uint8_t holder[MAX_REQUESTS + 1];
    uint8_t askers, takers; /* by bit */
    bool answered;
};

struct ghost {
    struct ghost_retry retry;
    struct ghost_record records[MAX_LIVES][MAX_RECORDS];
    uint8_t ack_set_undone[MAX_ACK_SETS];
    uint8_t ack_set_owner[MAX_ACK_SETS]; /* process */
    uint8_t ack_sets;
    uint8_t prompt_answers[2]; /* read answers, by index; of groups of two */
    uint8_t readers; /* lives of collectors so far */
};

extern struct segment template_segment;
