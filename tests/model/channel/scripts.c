/* Scripts of senders and receivers, promises, and the scenarios.
 *
 * Compiled with the hooks, like the channel's own files. A step's payload is two words, step * 2
 * and step * 2 + 1; its meta a letter. A receiver finds these values until its acknowledgement;
 * otherwise the explorer found a torn step. */
#include "model.h"

#include <stddef.h>
#include <string.h>

#include "channel/channel.h"

#define NS INT64_C(1000000)
/* Vain waits before a deadline passes. */
#define PATIENCE 3u
#define STEP_BYTES 16u
#define SLOT_BYTES 128u
/* Of a resuming sender: the checkpoint's step. */
#define RESUMED_AT 10

static struct channel template;

static struct channel *mine(void) {
    return &world.control.ghost.own[running];
}

static struct ghost *ghost(void) {
    return &world.control.ghost;
}

static uint8_t *slot_of(const struct channel *channel, uint64_t message) {
    return channel->file.control + channel->slots_offset +
           message % channel->slots * channel->slot_stride;
}

static unsigned lock_place(int64_t byte) {
    int64_t place = byte - CHANNEL_LOCK_SIDE;
    return place >= 0 && place < CHANNEL_SIDES ? (unsigned)place : LOCKS;
}

/* Slots have memory from the beginning; giving memory counts as a step all the same. */
enum shared_status channel_give_memory(const struct channel *self, uint32_t slot, uint64_t from,
                                        uint64_t bytes) {
    (void)self, (void)slot, (void)from, (void)bytes;
    engine_yield(OP_FENCE, NOWHERE, memory_order_relaxed, "channel_give_memory");
    return SHARED_OK;
}

/* ---- sides ---- */

/* Whether it became the side; a rival may hold the place for too long. */
static bool become(enum channel_side_name side) {
    unsigned vain = 0;
    ghost()->role[running] = (uint8_t)(side + 1);
    while (sides_claim(mine(), side, "x", (uint32_t)running + 1) != SHARED_OK) {
        if (++vain == PATIENCE) {
            return false;
        }
        engine_pause(false);
    }
    int holder = ghost()->holder[side] - 1;
    if (holder >= 0 && engine_is_alive(holder)) {
        engine_fail("P%d is a side that P%d still is", running, holder);
    }
    ghost()->holder[side] = (uint8_t)(running + 1);
    return true;
}

static void leave(void) {
    ghost()->holder[mine()->side] = 0;
    sides_leave(mine(), "r");
}

/* A side is reported dead only after a death of its holder. */
static void look_at(enum channel_side_name side) {
    if (sides_life(mine(), side) != CHANNEL_DEAD) {
        return;
    }
    for (int i = 0; i < AUDITOR; i++) {
        if (world.processes[i].state == P_DEAD && ghost()->role[i] == side + 1) {
            return;
        }
    }
    engine_fail("the %s was told dead, and none has died",
                side == CHANNEL_SENDER ? "sender" : "receiver");
}

static void count(struct channel_counts *counts) {
    if (messages_counts(mine(), counts) != SHARED_OK) {
        engine_fail("the counts contradict each other");
    }
}

/* Whether time remains after a wait for the other side. */
static bool wait_for(enum channel_side_name side, uint32_t ticket, unsigned *vain) {
    look_at(side);
    *vain += bell_wait(channel_bell(mine()->header, side), ticket, NS) == BELL_TIMEOUT;
    return *vain < PATIENCE;
}

/* ---- senders ---- */

static void send_until(int64_t last) {
    unsigned vain = 0;
    for (;;) {
        struct channel_counts counts;
        uint32_t slot = 0;
        uint32_t ticket = bell_announce(channel_bell(mine()->header, CHANNEL_RECEIVER));
        count(&counts);
        int64_t step = counts.step_base + (int64_t)counts.sent;
        if (step > last) {
            return;
        }
        enum shared_status status = messages_begin(mine(), STEP_BYTES, 1, &slot);
        if (status == SHARED_NOTHING) {
            if (!wait_for(CHANNEL_RECEIVER, ticket, &vain)) {
                return;
            }
            continue;
        }
        if (status != SHARED_OK || slot != counts.sent % mine()->slots) {
            engine_fail("a sender got status %d and slot %u", (int)status, slot);
        }
        _Atomic uint64_t *words = (_Atomic uint64_t *)slot_of(mine(), counts.sent);
        atomic_store_explicit(&words[0], (uint64_t)step * 2, memory_order_relaxed);
        atomic_store_explicit(&words[1], (uint64_t)step * 2 + 1, memory_order_relaxed);
        status = messages_send(mine(), CHANNEL_STEP, STEP_BYTES, slot_of(mine(), counts.sent),
                               (const uint8_t *)"m", 1, "");
        if (status != SHARED_OK) {
            engine_fail("a step was not sent: status %d", (int)status);
        }
    }
}

static void sends(int64_t last) {
    if (become(CHANNEL_SENDER)) {
        send_until(last);
        leave();
    }
}

static void resumes(void) {
    if (!become(CHANNEL_SENDER)) {
        return;
    }
    enum shared_status status = messages_begin_at(mine(), RESUMED_AT);
    if (status == SHARED_OK) {
        send_until(RESUMED_AT);
    } else if (status != SHARED_HELD) {
        engine_fail("a sender that resumes got status %d", (int)status);
    }
    leave();
}

static void states(unsigned times) {
    if (!become(CHANNEL_SENDER)) {
        return;
    }
    for (unsigned i = 0; i < times; i++) {
        uint8_t said[16];
        memset(said, running * 16 + (int)i + 1, sizeof said);
        sides_state(mine(), said, i == 0 ? 16 : 8);
    }
    leave();
}

/* ---- receivers ---- */

static void check_payload(const struct channel *channel, const struct channel_row *row) {
    _Atomic uint64_t *words = (_Atomic uint64_t *)slot_of(channel, row->sequence);
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t found = atomic_load_explicit(&words[i], memory_order_relaxed);
        if (found != (uint64_t)row->step * 2 + i) {
            engine_fail("step %lld is torn: word %u is %llu", (long long)row->step, i,
                        (unsigned long long)found);
        }
    }
    if (slot_of(channel, row->sequence)[channel_meta_at(row->bytes)] != 'm') {
        engine_fail("the meta of step %lld is not there", (long long)row->step);
    }
}

static void check_step(const struct channel_row *row) {
    if (row->step < 0 || row->step >= MAX_STEPS) {
        engine_fail("step %lld was never sent", (long long)row->step);
    }
    for (int64_t later = row->step; later < MAX_STEPS; later++) {
        if (ghost()->acked[later]) {
            engine_fail("step %lld after the acknowledgement of step %lld", (long long)row->step,
                        (long long)later);
        }
    }
    int64_t before = row->step == RESUMED_AT ? -1 : row->step - 1;
    if (before >= 0 && !ghost()->checked[before]) {
        engine_fail("step %lld without step %lld", (long long)row->step, (long long)before);
    }
}

static void receives(unsigned steps) {
    if (!become(CHANNEL_RECEIVER)) {
        return;
    }
    unsigned vain = 0;
    for (unsigned i = 0; i < steps;) {
        struct channel_row row;
        uint32_t ticket = bell_announce(channel_bell(mine()->header, CHANNEL_SENDER));
        enum shared_status status = messages_peek(mine(), &row);
        if (status == SHARED_NOTHING) {
            if (!wait_for(CHANNEL_SENDER, ticket, &vain)) {
                break;
            }
            continue;
        }
        if (status != SHARED_OK) {
            engine_fail("a receiver was told that a message is damaged");
        }
        check_step(&row);
        check_payload(mine(), &row);
        ghost()->checked[row.step] = 1;
        engine_yield(OP_FENCE, NOWHERE, memory_order_relaxed, "(uses the step)");
        check_payload(mine(), &row);
        messages_ack(mine());
        ghost()->acked[row.step] = 1;
        i++;
    }
    leave();
}

static void reads_statements(unsigned reads) {
    uint8_t said[CHANNEL_STATEMENT_BYTES];
    if (!become(CHANNEL_RECEIVER)) {
        return;
    }
    unsigned vain = 0;
    for (unsigned i = 0; i < reads;) {
        uint32_t bytes = 0;
        uint64_t version = 0;
        uint32_t ticket = bell_announce(channel_bell(mine()->header, CHANNEL_SENDER));
        enum shared_status status =
            sides_statement(mine(), CHANNEL_SENDER, said, &bytes, &version);
        if (status == SHARED_DAMAGED) {
            engine_fail("a statement that is being replaced was told damaged");
        }
        if (status != SHARED_OK) {
            if (!wait_for(CHANNEL_SENDER, ticket, &vain)) {
                break;
            }
            continue;
        }
        for (uint32_t k = 1; k < bytes; k++) {
            if (said[k] != said[0]) {
                engine_fail("a statement is mixed of two");
            }
        }
        i++;
    }
    leave();
}

/* ---- the whole ---- */

ROLE(sends_three, sends(2))
ROLE(sends_two, sends(1))
ROLE(receives_three, receives(3))
ROLE(receives_one, receives(1))
ROLE(receives_two, receives(2))
ROLE(states_two, states(2))
ROLE(reads_two, reads_statements(2))

/* Name, subject; scripts; mortal processes by bit, deaths, preemptions, slots. */
static const struct scenario scenarios[] = {
    {"pair", "a sender of three steps and a receiver over two slots",
     {sends_three, receives_three}, 3, 1, 1, 2, 0, 0},
    {"one_slot", "the same over one slot",
     {sends_three, receives_three}, 3, 1, 1, 1, 0, 0},
    {"sender", "a sender takes over from one that ended or died",
     {sends_two, sends_three, receives_three}, 7, 1, 1, 1, 0, 0},
    {"receiver", "a receiver takes over from one that ended or died",
     {sends_three, receives_one, receives_two}, 7, 1, 1, 2, 0, 0},
    {"resume", "a sender resumes after a checkpoint, with steps on their way, while a receiver comes",
     {sends_two, resumes, receives_two}, 7, 1, 1, 2, 0, 0},
    {"statements", "two senders, one after the other, state something twice each while it is read",
     {states_two, states_two, reads_two}, 7, 1, 1, 1, 0, 0},
    {.name = NULL},
};

static uint32_t prepare(const struct scenario *scenario) {
    template = (struct channel){.file.control = world.memory, .slots = scenario->slots,
                                .slot_stride = SLOT_BYTES, .max_bytes = SLOT_BYTES, .side = -1};
    uint8_t *at = world.memory;
    template.header = (struct channel_header *)at;
    at += CHANNEL_HEADER_BYTES;
    template.sides = (struct channel_side *)at;
    at += CHANNEL_SIDES * sizeof(struct channel_side);
    template.rows = (struct channel_row *)at;
    at += CHANNEL_MAX_SLOTS * sizeof(struct channel_row);
    template.statements = (struct channel_statement *)at;
    at += CHANNEL_SIDES * sizeof(struct channel_statement);
    template.slots_offset = (uint64_t)(at - world.memory);
    at += CHANNEL_MAX_SLOTS * SLOT_BYTES;
    if (at > world.memory + MEMORY_BYTES) {
        engine_fail("the model's memory is too small");
    }
    for (int i = 0; i < AUDITOR; i++) {
        world.control.ghost.own[i] = template;
        world.control.ghost.own[i].file.fd = i;
    }
    return (uint32_t)(at - world.memory);
}

/* A receiver is owed a message, or a statement; a sender a free slot. */
static bool is_owed(int process) {
    const struct process *p = &world.processes[process];
    const struct channel_header *header = template.header;
    if (p->futex == offsetof(struct channel_header, sent_bell)) {
        return header->sent > header->acked;
    }
    return header->sent - header->acked < template.slots;
}

/* After everybody's end: steps under way are whole, and a successor gets each of them once. */
static void audit(void) {
    struct channel successor = template;
    successor.side = CHANNEL_RECEIVER;
    struct channel_row row;
    enum shared_status status;
    while ((status = messages_peek(&successor, &row)) == SHARED_OK) {
        check_step(&row);
        check_payload(&successor, &row);
        ghost()->checked[row.step] = ghost()->acked[row.step] = 1;
        successor.header->acked++;
    }
    if (status != SHARED_NOTHING) {
        engine_fail("what is left is damaged");
    }
}

const struct subject subject = {
    .scenarios = scenarios,
    .prepare = prepare,
    .lock_place = lock_place,
    .is_owed = is_owed,
    .audit = audit,
};
