/* Puts and workers under a bound of one group ahead, with a collector that delivers: wake-ups pass
 * from the freed place to one waiter, and from the beginner of a group to the group's siblings.
 *
 * Invariant: each actor's knowledge between two checkpoints lies in its heap. */
#include "actors.h"

#include "../c/support.h"
#include "ring/lead.h"
#include "ring/requests.h"
#include "ring/segment.h"

enum { SAMPLES = 2, PAYLOAD = 8, ROUND = 7 };
#define WAIT_NS INT64_C(1000000000)

struct actor {
    struct segment segment;
    struct writer writer;
    uint64_t puts;
};

static struct actor *begin(void) {
    struct actor *self = memory_heap(running, sizeof *self);
    map_segment(&self->segment);
    while (writer_attach(&self->writer, &self->segment, "w") != WRITER_OK) {
        engine_pause(true);
    }
    engine_checkpoint();
    return self;
}

static void commit(struct actor *self, struct sample *sample, struct reservation *at) {
    struct writer *writer = &self->writer;
    ghost_claimed(writer->producer_id, self->puts, at);
    fill(writer, sample, at, ghost_pattern(writer->producer_id, self->puts));
    ghost_begin_commit(writer->producer_id, self->puts);
    writer_publish(writer, at);
    ghost_committed(writer->producer_id, self->puts++);
    doorbell_ring(self->segment.header);
    engine_checkpoint();
}

static bool admit(struct actor *self, const struct sample *sample, uint64_t key,
                  struct reservation *at) {
    if (writer_claim(&self->writer, sample->spec.record_bytes, at) != WRITER_OK) {
        engine_fail("P%d finds no space", running);
    }
    enum lead_verdict verdict =
        lead_admit(&self->segment, key, self->writer.slot_index, SAMPLES - 1);
    at->admitted = verdict == LEAD_CLAIMED ? key : 0;
    return verdict != LEAD_FULL;
}

void put_groups(uint32_t index) {
    struct actor *self = begin();
    struct bell *bell = &self->segment.header->space_bell;
    while (self->puts < 2) {
        struct sample sample;
        struct reservation at;
        make_sample(&sample, self->puts == 0 ? "a" : "b", PAYLOAD);
        sample.spec.group_size = SAMPLES;
        sample.spec.index = index;
        uint64_t key = lead_key(sample.spec.id, 1, sample.spec.round, SHMBUS_SPLIT_TRAIN);
        while (!admit(self, &sample, key, &at)) {
            uint32_t ticket = bell_announce(bell);
            doorbell_ring(self->segment.header);
            if (admit(self, &sample, key, &at)) {
                break;
            }
            bell_wait_for(bell, lead_waiters(key), ticket, WAIT_NS);
        }
        commit(self, &sample, &at);
    }
    writer_close(&self->writer);
}

void offer_groups(void) {
    struct segment *segment = memory_heap(running, sizeof *segment);
    map_segment(segment);
    for (unsigned i = 0; i < 2; i++) {
        struct request_offer offer = {.id = i == 0 ? "a" : "b",
                                      .id_bytes = 1,
                                      .prompt = (const uint8_t *)"p",
                                      .prompt_bytes = 1,
                                      .round = ROUND,
                                      .group_size = SAMPLES,
                                      .need = SAMPLES};
        uint32_t done;
        uint64_t number;
        if (request_offer(segment, &offer, 1, &done, &number) != FEED_DONE) {
            engine_fail("P%d cannot offer", running);
        }
    }
}

void work_on_groups(void) {
    struct actor *self = begin();
    struct bell *bell = &self->segment.requests.lane->work;
    while (self->puts < 2) {
        struct request_claim claim;
        uint32_t ticket = bell_announce(bell);
        if (request_take(&self->segment, self->writer.producer_id, self->writer.slot_index,
                         &claim) != REQUEST_TAKEN) {
            bell_wait_for(bell, WORK_IDLE, ticket, WAIT_NS);
            engine_checkpoint();
            continue;
        }
        struct request_row text;
        uint8_t data[2];
        struct sample sample;
        struct reservation at;
        text.data_bytes = sizeof data;
        if (!request_read(&self->segment, claim.row, claim.number, &text, data)) {
            engine_fail("P%d has a sample of a prompt that is not whole", running);
        }
        make_sample(&sample, data[0] == 'a' ? "a" : "b", PAYLOAD);
        sample.spec.group_size = SAMPLES;
        sample.spec.index = claim.index;
        sample.spec.round = ROUND;
        if (writer_claim(&self->writer, sample.spec.record_bytes, &at) != WRITER_OK) {
            engine_fail("P%d finds no space", running);
        }
        at.answers = claim;
        commit(self, &sample, &at);
    }
    /* No close: a close wakes other workers. */
}
