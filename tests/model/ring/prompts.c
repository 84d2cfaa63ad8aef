/* Steps of a feeder and workers with the request lane: the calls of shmbus/handles/feeder.py and
 * shmbus/handles/producer_requests.py, in their order, over a group of two samples.
 *
 * Promise at the end, through any death: a finished sample has a single answer in the ring, an open
 * sample has none and lies in nobody's hands. A dead feeder leaves a whole request or none.
 *
 * Invariant: between two checkpoints an actor's whole knowledge lies in its heap. */
#include "actors.h"

#include <string.h>

#include "../c/support.h"
#include "hooks_api.h"
#include "ring/lead.h"
#include "ring/segment.h"
#include "ring/recovery.h"
#include "ring/requests.h"

enum { SAMPLES = 2, PAYLOAD = 8 };

struct actor {
    struct segment segment;
    struct writer writer;
    uint64_t answers;
};

static struct actor *begin(void) {
    struct actor *self = memory_heap(running, sizeof *self);
    map_segment(&self->segment);
    return self;
}

void offer_prompt(void) {
    struct actor *self = begin();
    static const uint8_t prompt[] = {'t', 1, 2, 3};
    struct request_offer offer = {.id = "q",
                                  .prompt = prompt,
                                  .id_bytes = 1,
                                  .prompt_bytes = sizeof prompt,
                                  .split = 0,
                                  .round = 7,
                                  .group_size = SAMPLES,
                                  .need = SAMPLES};
    uint32_t done;
    uint64_t number;
    while (request_offer(&self->segment, &offer, 1, &done, &number) != FEED_DONE) {
        engine_pause(true);
    }
}

static void answer(struct actor *self, const struct request_claim *claim) {
    struct writer *writer = &self->writer;
    struct reservation at;
    struct sample sample;
    make_sample(&sample, "q", PAYLOAD);
    sample.spec.group_size = SAMPLES;
    sample.spec.index = claim->index;
    if (writer_claim(writer, sample.spec.record_bytes, &at) != WRITER_OK) {
        engine_fail("P%d finds no space for its answer", running);
    }
    at.answers = *claim;
    ghost_claimed(writer->producer_id, self->answers, &at);
    fill(writer, &sample, &at, ghost_pattern(writer->producer_id, self->answers));
    ghost_begin_commit(writer->producer_id, self->answers);
    writer_publish(writer, &at);
    ghost_committed(writer->producer_id, self->answers++);
}

void work_on_prompts(uint8_t feeders) {
    struct actor *self = begin();
    while (writer_attach(&self->writer, &self->segment, "w") != WRITER_OK) {
        engine_pause(true);
    }
    engine_checkpoint();
    for (;;) {
        struct request_claim claim;
        bool last = are_finished(feeders);
        if (last) {
            recover_dead(&self->segment, self->writer.slot_index, RECOVERY_WHOLE);
        }
        if (request_take(&self->segment, self->writer.producer_id, self->writer.slot_index,
                         &claim) == REQUEST_TAKEN) {
            struct request_row text;
            uint8_t data[8];
            if (!request_read(&self->segment, claim.row, claim.number, &text, NULL) ||
                text.data_bytes != 5 ||
                !request_read(&self->segment, claim.row, claim.number, &text, data) ||
                text.round != 7 || memcmp(data, "qt\1\2\3", 5) != 0) {
                engine_fail("P%d has a sample of a prompt that is not whole", running);
            }
            answer(self, &claim);
            engine_checkpoint();
        } else if (last) {
            break;
        } else {
            engine_pause(true);
        }
    }
    writer_close(&self->writer);
}

/* The auditor, after every slot was recovered and the ring was read. */
void audit_prompts(struct segment *segment) {
    if (!requests_are_used(segment) || lead_is_bounded(segment)) {
        return;
    }
    request_heal(segment);
    const struct request_parts *parts = &segment->requests;
    const uint8_t *answers = world.control.ghost.prompt_answers;
    unsigned open_rows = 0;
    for (uint32_t row = 0; row < parts->row_count; row++) {
        uint64_t number = request_open_row(segment, row);
        struct request_row copy;
        if (number == 0) {
            continue;
        }
        if (!request_copy_row(segment, row, number, &copy) || ++open_rows > 1) {
            engine_fail("a feeder's request is damaged, or there twice");
        }
        for (uint32_t i = 0; i < SAMPLES; i++) {
            uint64_t claim = atomic_load_explicit(&parts->cells[copy.first_cell + i].claim,
                                                  memory_order_acquire);
            enum request_kind kind = request_kind_of(claim);
            if (kind == CELL_IS_CLAIMED || answers[i] != (kind == CELL_IS_DONE)) {
                engine_fail("sample %u is in state %d, with %u answers in the ring", i, (int)kind,
                            answers[i]);
            }
            struct request_claim again;
            if (kind == CELL_IS_OPEN &&
                request_take(segment, 1, 0, &again) != REQUEST_TAKEN) {
                engine_fail("sample %u is open, and nobody finds it", i);
            }
        }
    }
    if (open_rows == 0 && answers[0] + answers[1] > 0) {
        engine_fail("there are answers to a request that is not there");
    }
}
