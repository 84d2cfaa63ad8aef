/* Scripts of publishers, ranks and readers, promises, and the scenarios.
 *
 * Compiled with the hooks, like the pool's own files. A version's payload is two words, sequence
 * * 2 and sequence * 2 + 1; of two ranks each writes a word. A lease finds these values, twice;
 * otherwise the explorer found a torn version. */
#include "model.h"

#include <stddef.h>
#include <string.h>

#include "pool/pool.h"

#define NS INT64_C(1000000)
/* Vain waits before a deadline passes. */
#define PATIENCE 3u

static struct pool template;

static struct pool *mine(void) {
    return &world.control.ghost.own[running];
}

static _Atomic uint64_t *word_of(const struct pool *pool, uint32_t slot, uint32_t rank) {
    return (_Atomic uint64_t *)pool_payload(pool, slot) + rank;
}

static void check_payload(const struct slot_row *row, uint32_t slot) {
    for (uint32_t rank = 0; rank < 2; rank++) {
        uint64_t found =
            atomic_load_explicit(word_of(mine(), slot, rank), memory_order_relaxed);
        if (found != row->sequence * 2 + rank) {
            engine_fail("version %llu is torn: rank %u has %llu",
                        (unsigned long long)row->sequence, rank, (unsigned long long)found);
        }
    }
}

/* layout.h computed with 64 ranks before small_subject.h made them two. */
static unsigned lock_place(int64_t byte) {
    int64_t at = byte - POOL_LOCK_BASE, piece = at - 1024;
    int64_t place = at < 64     ? at
                    : at < 256  ? 4 + at - 64
                    : at < 1024 ? 8 + at - 256
                                : 16 + piece / 64 * 2 + piece % 64;
    return place < 0 ? LOCKS : (unsigned)place;
}

/* ---- publishers ---- */

static void become(uint32_t rank) {
    while (rows_claim_writer(mine(), rank, "w", (uint32_t)running + 1) != SHARED_OK) {
        engine_pause(false);
    }
}

/* The slot, or NOWHERE at its deadline. */
static uint32_t begin(uint32_t ranks, uint64_t *sequence) {
    struct version_facts facts = {.version = 1, .bytes = 16, .meta = "m", .meta_bytes = 1,
                                  .text = "t", .ranks = ranks};
    for (unsigned vain = 0; vain < PATIENCE;) {
        uint32_t slot = 0;
        uint32_t ticket = bell_announce(pool_bell(mine(), POOL_BELL_SPACE));
        if (publish_begin(mine(), &facts, &slot, sequence) == SHARED_OK) {
            return slot;
        }
        vain += bell_wait(pool_bell(mine(), POOL_BELL_SPACE), ticket, NS) == BELL_TIMEOUT;
    }
    return NOWHERE;
}

/* Whether the second rank's piece exists; false if it never will. */
static bool await_piece(uint64_t sequence) {
    for (unsigned vain = 0; vain < PATIENCE;) {
        uint32_t ticket = bell_announce(pool_bell(mine(), POOL_BELL_RANKS));
        enum piece_state state = publish_piece_state(mine(), sequence, 1);
        if (state == PIECE_DONE) {
            return true;
        }
        if (state == PIECE_DEAD || state == PIECE_FAILED ||
            (state == PIECE_ABSENT && world.control.deaths > 0)) {
            return false;
        }
        vain += bell_wait(pool_bell(mine(), POOL_BELL_RANKS), ticket, NS) == BELL_TIMEOUT;
    }
    return false;
}

static void publish(unsigned versions, uint32_t ranks) {
    become(0);
    for (unsigned i = 0; i < versions; i++) {
        uint64_t sequence = 0;
        uint32_t slot = begin(ranks, &sequence);
        if (slot == NOWHERE) {
            break;
        }
        atomic_store_explicit(word_of(mine(), slot, 0), sequence * 2, memory_order_relaxed);
        if (ranks == 1) {
            atomic_store_explicit(word_of(mine(), slot, 1), sequence * 2 + 1,
                                  memory_order_relaxed);
        }
        if (ranks > 1 && !await_piece(sequence)) {
            publish_give_up(mine());
            publish_let_go(mine(), slot);
            continue;
        }
        world.control.ghost.whole[sequence % MAX_VERSIONS] = 1;
        publish_finish(mine(), slot, sequence, 0);
        if (sequence > world.control.ghost.finished) {
            world.control.ghost.finished = sequence;
        }
    }
    rows_leave(mine());
}

static void join(unsigned versions) {
    struct slot_row row;
    become(1);
    for (unsigned i = 0, vain = 0; i < versions && vain < PATIENCE;) {
        uint32_t slot = 0;
        uint32_t ticket = bell_announce(pool_bell(mine(), POOL_BELL_RANKS));
        enum shared_status status = publish_join(mine(), &slot, &row);
        if (status != SHARED_OK) {
            vain += bell_wait(pool_bell(mine(), POOL_BELL_RANKS), ticket, NS) == BELL_TIMEOUT;
            continue;
        }
        atomic_store_explicit(word_of(mine(), slot, 1), row.sequence * 2 + 1,
                              memory_order_relaxed);
        if (world.control.ghost.whole[row.sequence % MAX_VERSIONS]) {
            engine_fail("a piece was written after the end of its version");
        }
        publish_piece_done(mine(), row.sequence);
        publish_piece_let_go(mine(), slot);
        for (vain = 0; vain < PATIENCE;) {
            ticket = bell_announce(pool_bell(mine(), POOL_BELL_RANKS));
            status = publish_outcome(mine(), row.sequence);
            if (status != SHARED_NOTHING) {
                break;
            }
            vain += bell_wait(pool_bell(mine(), POOL_BELL_RANKS), ticket, NS) == BELL_TIMEOUT;
        }
        if (status == SHARED_GONE && row.sequence < MAX_VERSIONS) {
            world.control.ghost.gone[row.sequence] = 1;
        }
        i++;
    }
    rows_leave(mine());
}

/* ---- readers ---- */

static void read_versions(unsigned reads) {
    uint64_t after = 0;
    struct slot_row row;
    if (rows_claim_reader(mine(), "r", "", (uint32_t)running + 1, false) != SHARED_OK) {
        engine_fail("a reader got no row");
    }
    for (unsigned i = 0; i < reads;) {
        uint32_t slot = 0;
        uint32_t ticket = bell_announce(pool_bell(mine(), POOL_BELL_VERSION));
        enum shared_status status = lease_latest(mine(), after, &slot, &row);
        if (status == SHARED_DAMAGED) {
            engine_fail("a reader was told that the newest version is damaged");
        }
        if (status != SHARED_OK) {
            if (bell_wait(pool_bell(mine(), POOL_BELL_VERSION), ticket, NS) == BELL_TIMEOUT) {
                i++; /* the last publisher may be gone */
            }
            continue;
        }
        if (row.sequence <= after) {
            engine_fail("sequence %llu after %llu", (unsigned long long)row.sequence,
                        (unsigned long long)after);
        }
        if (row.sequence < MAX_VERSIONS && world.control.ghost.gone[row.sequence]) {
            engine_fail("a version that a rank was told was given up");
        }
        after = row.sequence;
        check_payload(&row, slot);
        rows_applied(mine(), row.sequence, row.version);
        check_payload(&row, slot);
        lease_drop(mine(), slot);
        i++;
    }
    rows_leave(mine());
}

/* ---- the whole ---- */

ROLE(publishes_three, publish(3, 1))
ROLE(publishes_two, publish(2, 1))
ROLE(publishes_one, publish(1, 1))
ROLE(leads_one, publish(1, 2))
ROLE(joins_one, join(1))
ROLE(leads_two, publish(2, 2))
ROLE(joins_two, join(2))
ROLE(reads_one, read_versions(1))
ROLE(reads_two, read_versions(2))

/* Name, subject; scripts; mortal processes by bit, deaths, preemptions, slots. */
static const struct scenario scenarios[] = {
    {"reader", "a publisher and a reader over two slots",
     {publishes_three, reads_two}, 3, 1, 1, 2, 0, 0},
    {"readers", "a publisher and two readers over two slots",
     {publishes_three, reads_two, reads_one}, 7, 1, 1, 2, 0, 0},
    {"successor", "a publisher takes over from one that ended or died, beside a reader",
     {publishes_two, publishes_two, reads_two}, 7, 1, 1, 2, 0, 0},
    {"ranks", "two ranks write two versions, beside a reader",
     {leads_two, joins_two, reads_one}, 7, 1, 1, 2, 0, 0},
    {"late_rank", "a publisher takes over while a rank of the one before it still writes",
     {leads_one, joins_one, publishes_one}, 7, 1, 1, 1, 0, 0}, /* so that both take the same */
    {.name = NULL},
};

static uint32_t prepare(const struct scenario *scenario) {
    template = (struct pool){.file.control = world.memory, .max_slots = scenario->slots,
                             .slot_bytes = 16, .meta_bytes = 8, .block_bytes = POOL_MIN_BLOCK,
                             .rank = -1, .reader = -1};
    uint8_t *at = world.memory;
    template.header = (struct pool_header *)at;
    at += POOL_HEADER_BYTES;
    template.slot_rows = (struct slot_row *)at;
    at += POOL_MAX_SLOTS * sizeof(struct slot_row);
    template.rank_rows = (struct rank_row *)at;
    at += POOL_MAX_RANKS * sizeof(struct rank_row);
    template.reader_rows = (struct reader_row *)at;
    at += POOL_MAX_READERS * sizeof(struct reader_row);
    template.slots = at;
    template.slot_stride = 64;
    at += POOL_MAX_SLOTS * template.slot_stride;
    if (at > world.memory + MEMORY_BYTES) {
        engine_fail("the model's memory is too small");
    }
    atomic_init(&template.header->next_sequence, 1);
    atomic_init(&template.header->slots_open, scenario->slots);
    for (int i = 0; i < AUDITOR; i++) {
        world.control.ghost.own[i] = template;
        world.control.ghost.own[i].file.fd = i;
    }
    return (uint32_t)(at - world.memory);
}

/* A reader is owed an unseen version, a publisher a free slot or a finished piece, a rank an
 * unwritten version. */
static bool is_owed(int process) {
    const struct process *p = &world.processes[process];
    const struct pool *own = &world.control.ghost.own[process];
    uint64_t latest = template.header->latest >> 8;
    if (own->reader >= 0) {
        return latest > 0 && template.reader_rows[own->reader].applied < latest;
    }
    bool readers_hold = false;
    for (unsigned i = 0; i < 4; i++) {
        readers_hold = readers_hold || world.control.shared[i] != 0;
    }
    uint64_t writing = template.header->writing >> 8, done = template.rank_rows[1].done;
    if (p->futex == offsetof(struct pool_header, ranks_bell)) {
        return own->rank == 0 ? writing != 0 && done == writing : writing > done;
    }
    bool wants_space = p->futex == offsetof(struct pool_header, space_bell);
    return wants_space && !readers_hold && template.max_slots > 1;
}

/* After everybody's end: the newest version is whole, and a successor can publish. */
static void audit(void) {
    uint64_t latest = template.header->latest;
    uint32_t slot = pool_word_slot(latest);
    if (pool_word_sequence(latest) < world.control.ghost.finished) {
        engine_fail("version %llu was published, and the newest is %llu",
                    (unsigned long long)world.control.ghost.finished,
                    (unsigned long long)pool_word_sequence(latest));
    }
    if (latest == POOL_NO_VERSION) {
        return;
    }
    struct slot_row row;
    if (!lease_peek(&template, slot, &row) || row.sequence != pool_word_sequence(latest)) {
        engine_fail("the newest version's row is not whole");
    }
    if (world.control.ghost.gone[row.sequence % MAX_VERSIONS]) {
        engine_fail("the newest version is one that a rank was told was given up");
    }
    const uint64_t *words = (const uint64_t *)pool_payload(&template, slot);
    for (uint32_t rank = 0; rank < 2; rank++) {
        if (words[rank] != row.sequence * 2 + rank) {
            engine_fail("the newest version is torn");
        }
    }
}

const struct subject subject = {
    .scenarios = scenarios,
    .prepare = prepare,
    .lock_place = lock_place,
    .is_owed = is_owed,
    .audit = audit,
};
