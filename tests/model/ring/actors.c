/* What producers, collectors and the auditor do: the calls of python/put/writer_object.c,
 * python/read/reader_object.c and consumer.py, in their order, without Python.
 *
 * Invariant: all that an actor knows between two checkpoints lies in its heap. */
#include "actors.h"

#include "../c/support.h"
#include "ring/lead.h"
#include "ring/requests.h"
#include "ring/segment.h"

#define WAIT_NS INT64_C(1000000000)
#define PAYLOAD_BYTES 8
/* Fills a run of two extents. */
#define JUMBO_BYTES 600
/* Fills an extent. */
#define WHOLE_BYTES 300

struct actor {
    struct segment segment;
    struct writer writer;
    struct reader reader;
    struct record_ref held[8];
    uint64_t keys[8][2];
    unsigned held_count, life;
    uint64_t group; /* key of the last record */
};

void map_segment(struct segment *s) {
    ptrdiff_t shift = (bounds.weak ? world.view[running] : world.memory) - template_segment.base;
    *s = template_segment;
    s->fd = running;
    s->base += shift;
    s->header = (struct bus_header *)(void *)((uint8_t *)s->header + shift);
    s->slots = (struct producer_slot *)(void *)((uint8_t *)s->slots + shift);
    s->extents = (struct extent_desc *)(void *)((uint8_t *)s->extents + shift);
    s->intent_log = (_Atomic uint64_t *)(void *)((uint8_t *)s->intent_log + shift);
    s->retries = (struct retry_entry *)(void *)((uint8_t *)s->retries + shift);
    s->lead = (struct lead_table *)(void *)((uint8_t *)s->lead + shift);
    struct request_parts *parts = &s->requests;
    parts->lane = (struct request_lane *)(void *)((uint8_t *)parts->lane + shift);
    parts->rows = (struct request_row *)(void *)((uint8_t *)parts->rows + shift);
    parts->order = (_Atomic uint32_t *)(void *)((uint8_t *)parts->order + shift);
    parts->cells = (struct request_cell *)(void *)((uint8_t *)parts->cells + shift);
    parts->block_bits = (uint64_t *)(void *)((uint8_t *)parts->block_bits + shift);
    parts->unit_bits = (uint64_t *)(void *)((uint8_t *)parts->unit_bits + shift);
    parts->units += shift;
    s->splits = (struct split_entry *)(void *)((uint8_t *)s->splits + shift);
    s->cancelled = (_Atomic uint64_t *)(void *)((uint8_t *)s->cancelled + shift);
    s->data += shift;
}

static struct actor *begin(void) {
    struct actor *self = memory_heap(running, sizeof *self);
    map_segment(&self->segment);
    return self;
}

/* ---- producers ---- */

static void claim_waiting(struct writer *writer, uint64_t bytes, struct reservation *at) {
    struct bus_header *header = writer->segment->header;
    while (writer_claim(writer, bytes, at) != WRITER_OK) {
        writer_seal(writer);
        uint32_t ticket = bell_announce(&header->space_bell);
        doorbell_ring(header);
        if (writer_claim(writer, bytes, at) == WRITER_OK) {
            return;
        }
        bell_wait(&header->space_bell, ticket, WAIT_NS);
    }
}

static void open_record(struct actor *self, uint64_t number, uint64_t payload,
                        struct reservation *at) {
    struct writer *writer = &self->writer;
    struct sample sample;
    make_sample(&sample, "a", payload);
    sample.spec.group_size = 1;
    sample.spec.index = 0;
    claim_waiting(writer, sample.spec.record_bytes, at);
    ghost_claimed(writer->producer_id, number, at);
    fill(writer, &sample, at, ghost_pattern(writer->producer_id, number));
}

static void end_record(struct actor *self, uint64_t number, const struct reservation *at,
                       enum way way) {
    struct writer *writer = &self->writer;
    uint64_t life = writer->producer_id;
    if (way == ABORT) {
        writer_abort(writer, at);
        ghost_aborted(life, number);
    } else {
        ghost_begin_commit(life, number);
        if (way == PUT || way == WHOLE) {
            writer_publish(writer, at);
        } else {
            writer_commit(writer, at);
        }
        ghost_committed(life, number);
    }
    doorbell_ring(self->segment.header);
}

static struct actor *attach_producer(void) {
    struct actor *self = begin();
    while (writer_attach(&self->writer, &self->segment, "p") != WRITER_OK) {
        engine_pause(true);
    }
    engine_checkpoint();
    return self;
}

static uint64_t payload_of(enum way way) {
    return way == JUMBO ? JUMBO_BYTES : way == WHOLE ? WHOLE_BYTES : PAYLOAD_BYTES;
}

void produce(const enum way *ways, unsigned n) {
    struct actor *self = attach_producer();
    uint64_t number = 0;
    for (unsigned i = 0; i < n; i++) {
        struct reservation at;
        if (ways[i] == IDLE) {
            engine_pause(true);
            continue;
        }
        open_record(self, number, payload_of(ways[i]), &at);
        if (ways[i] == RESERVE || ways[i] == ABORT || ways[i] == JUMBO) {
            writer_reserve(&self->writer, &at);
        }
        end_record(self, number, &at, ways[i]);
        number += ways[i] != ABORT;
        engine_checkpoint();
    }
    writer_close(&self->writer);
}

/* Two reservations, ended in the other order, and a record put between. */
void produce_interleaved(void) {
    struct actor *self = attach_producer();
    struct reservation first, second;
    open_record(self, 1, PAYLOAD_BYTES, &first);
    writer_reserve(&self->writer, &first);
    open_record(self, 0, PAYLOAD_BYTES, &second);
    end_record(self, 0, &second, PUT);
    end_record(self, 1, &first, RESERVE);
    writer_close(&self->writer);
}

/* ---- collectors ---- */

static void attach_collector(struct actor *self) {
    while (file_lock_take(self->segment.fd, SHMBUS_LOCK_COLLECTOR) != LOCK_TAKEN) {
        engine_pause(true);
    }
    if (!reader_attach(&self->reader, &self->segment)) {
        engine_fail("reader_attach failed");
    }
    self->life = ghost_new_reader();
    engine_checkpoint();
}

static bool take(struct actor *self) {
    struct record_ref ref;
    int found = reader_next(&self->reader, &ref);
    if (self->reader.corrupt != 0) {
        engine_fail("a record counts as corrupt");
    }
    if (found <= 0) {
        return false;
    }
    ghost_delivered(&self->reader, &ref, self->life);
    self->keys[self->held_count][0] = self->reader.copy.header.producer_id;
    self->keys[self->held_count][1] = self->reader.copy.header.sequence;
    const struct record_header *header = &self->reader.copy.header;
    self->group = lead_key(self->reader.copy.id, header->id_bytes, header->round, header->split);
    if (header->group_size == 2) {
        world.control.ghost.prompt_answers[header->index]++;
    }
    self->held[self->held_count++] = ref;
    return true;
}

static void acknowledge(struct actor *self) {
    const struct record_ref *refs[8];
    unsigned n = self->held_count;
    for (unsigned i = 0; i < n; i++) {
        refs[i] = &self->held[i];
    }
    ghost_begin_ack((const uint64_t (*)[2])self->keys, n);
    intent_log_release(self->reader.segment, refs, n, SHMBUS_ACKED, SHMBUS_SPLIT_TRAIN);
    ghost_acked((const uint64_t (*)[2])self->keys, n);
    for (unsigned i = 0; i < n; i++) {
        reader_let_go(&self->reader, &self->held[i]);
    }
    self->held_count = 0;
}

bool are_finished(uint8_t processes) {
    bool finished = (world.control.finished & processes) == processes;
    engine_observe(finished);
    return finished;
}

static void wait_for_events(struct actor *self) {
    struct bus_header *header = self->segment.header;
    if (reader_has_events(&self->reader)) {
        return;
    }
    doorbell_announce(header);
    if (reader_has_events(&self->reader)) {
        doorbell_stay(header);
    } else if (doorbell_sleep(header, WAIT_NS) == BELL_TIMEOUT) {
        reader_sweep(&self->reader, RECOVERY_WHOLE);
    }
}

static void move_all(struct actor *self) {
    for (unsigned i = 0; i < self->held_count; i++) {
        ghost_moving(self->keys[i][0], self->keys[i][1], NULL);
        reader_move(&self->reader, &self->held[i]);
        ghost_moving(self->keys[i][0], self->keys[i][1], &self->held[i]);
    }
}

void collect(unsigned group, uint8_t producers, enum habit habit) {
    struct actor *self = begin();
    attach_collector(self);
    for (;;) {
        bool last = are_finished(producers);
        if (last) {
            reader_sweep(&self->reader, RECOVERY_WHOLE);
        }
        bool found = take(self);
        if (self->held_count == group && habit == DELIVERS) {
            uint32_t row;
            uint64_t number = request_find(&self->segment, self->reader.copy.id, 1,
                                           self->reader.copy.header.round, 0, &row);
            if (number != 0) {
                request_close(&self->segment, row, number);
            }
            lead_leave(&self->segment, self->group);
        }
        if (self->held_count == group && habit == MOVES) {
            move_all(self);
        }
        if (found && habit == KEEPS && self->keys[0][1] % 2 == 0) {
            self->held_count = 0;
        } else if (self->held_count == group || (last && !found && self->held_count > 0)) {
            acknowledge(self);
        }
        if (habit == SWEEPS) {
            reader_sweep(&self->reader, RECOVERY_WHOLE);
        }
        engine_checkpoint();
        if (found) {
            continue;
        }
        if (last) {
            break;
        }
        wait_for_events(self);
        engine_checkpoint();
    }
    writer_seal(&self->reader.mover);
}

/* ---- the auditor: alone at the end of each run ---- */

static void drain(struct actor *self) {
    while (take(self)) {
        acknowledge(self);
    }
}

void audit_script(void) {
    struct actor *self = begin();
    if (file_lock_take(self->segment.fd, SHMBUS_LOCK_COLLECTOR) != LOCK_TAKEN) {
        engine_fail("a dead collector's lock is still held");
    }
    attach_collector(self);
    drain(self);
    reader_sweep(&self->reader, RECOVERY_WHOLE);
    drain(self);
    ghost_end(&self->reader);
    audit_retries(&self->segment);
    audit_prompts(&self->segment);
    if (writer_attach(&self->writer, &self->segment, "a") != WRITER_OK) {
        engine_fail("no slot is free at the end");
    }
    struct reservation at;
    open_record(self, 0, PAYLOAD_BYTES, &at);
    end_record(self, 0, &at, PUT);
    if (!take(self)) {
        engine_fail("a record put after all is over is not delivered");
    }
    acknowledge(self);
    writer_close(&self->writer);
    drain(self);
    reader_sweep(&self->reader, RECOVERY_WHOLE);
    drain(self);
    ghost_end(&self->reader);
}
