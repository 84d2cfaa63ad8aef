/* The C core's hot path, call by call, for instructions to be counted: the ring alone, no Python.
 *
 * usage: hot_path ROUNDS. Each round sends, reads and releases a window of records over one mapping;
 * what is counted is what happens within the functions named op_*, one for each operation. A
 * record's payload is small, since copying it is not what is measured. Exit status 1 if a call
 * fails. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "doorbell.h"
#include "gather.h"
#include "reader.h"
#include "writer.h"

enum { WINDOW = 64, PAYLOAD = 64, TOKENS = 2048, CAPACITY = 4 << 20, FIELDS = 3, PRODUCERS = 64 };

/* Not inlined, so that a profiler sees where each begins and ends. */
#define OPERATION __attribute__((noinline, noclone)) static void

static void require(bool condition, const char *what) {
    if (!condition) {
        fprintf(stderr, "hot_path: %s failed\n", what);
        exit(1);
    }
}

/* Three byte fields, as a trajectory has three arrays. */
struct sample {
    struct record_spec spec;
    uint64_t shape[2 * FIELDS];
    uint64_t field_bytes[FIELDS];
    uint8_t field_ndim[FIELDS];
    uint8_t schema[FIELDS * (sizeof(struct schema_entry) + 4)];
};

static void describe(struct sample *sample) {
    static const char names[FIELDS] = {'t', 'm', 'l'};
    memset(sample, 0, sizeof *sample);
    uint8_t *entry = sample->schema;
    for (int i = 0; i < FIELDS; i++) {
        struct schema_entry head = {.name_bytes = 1, .dtype_bytes = 3, .itemsize = 1, .ndim = 1};
        memcpy(entry, &head, sizeof head);
        entry[sizeof head] = (uint8_t)names[i];
        memcpy(entry + sizeof head + 1, "|u1", 3);
        entry += sizeof head + 4;
        sample->shape[2 * i + 1] = PAYLOAD;
        sample->field_bytes[i] = PAYLOAD;
        sample->field_ndim[i] = 1;
    }
}

static const uint8_t payload[PAYLOAD];

OPERATION op_put(struct writer *writer, struct sample *sample, uint32_t index) {
    struct reservation at;
    sample->spec = (struct record_spec){.id = "gsm8k-1742",
                                        .id_bytes = 10,
                                        .schema = sample->schema,
                                        .schema_bytes = sizeof sample->schema,
                                        .shape = sample->shape,
                                        .shape_words = 2 * FIELDS,
                                        .field_bytes = sample->field_bytes,
                                        .field_ndim = sample->field_ndim,
                                        .field_count = FIELDS,
                                        .group_size = 8,
                                        .index = index & 7,
                                        .score = 1.0};
    require(record_plan(&sample->spec), "record_plan");
    require(writer_claim(writer, sample->spec.record_bytes, &at) == WRITER_OK, "writer_claim");
    record_write_frame(at.record, &at.place, at.bytes, writer->producer_id, writer->slot_index, 0);
    record_write_body(at.record, &sample->spec);
    for (int i = 0; i < FIELDS; i++) {
        memcpy((uint8_t *)at.record + sample->shape[2 * i], payload, PAYLOAD);
    }
    writer_publish(writer, &at);
    doorbell_ring(writer->segment->header);
}

OPERATION op_reserve_and_commit(struct writer *writer, struct sample *sample) {
    struct reservation at;
    require(record_plan(&sample->spec), "record_plan");
    require(writer_claim(writer, sample->spec.record_bytes, &at) == WRITER_OK, "writer_claim");
    record_write_frame(at.record, &at.place, at.bytes, writer->producer_id, writer->slot_index, 0);
    record_write_body(at.record, &sample->spec);
    writer_reserve(writer, &at);
    writer_commit(writer, &at);
    doorbell_ring(writer->segment->header);
}

OPERATION op_read(struct reader *reader, struct record_ref *ref) {
    require(reader_next(reader, ref) > 0, "reader_next");
}

OPERATION op_look_in_vain(struct reader *reader, struct record_ref *ref) {
    require(reader_next(reader, ref) == 0, "reader_next");
}

OPERATION op_release_a_group(struct reader *reader, struct record_ref *refs) {
    const struct record_ref *group[8];
    for (int i = 0; i < 8; i++) {
        group[i] = &refs[i];
    }
    reader_release(reader, group, 8, SHMBUS_ACKED);
    for (int i = 0; i < 8; i++) {
        reader_let_go(reader, &refs[i]);
    }
}

struct batch {
    int64_t tokens[TOKENS], positions[TOKENS];
    uint8_t mask[TOKENS];
    float logprobs[TOKENS], advantages[TOKENS];
    int32_t source_tokens[TOKENS];
    uint8_t source_mask[TOKENS];
    float source_logprobs[TOKENS];
};

OPERATION op_gather(struct batch *batch) {
    gather_i64(batch->tokens, batch->source_tokens, ELEMENT_I32, TOKENS);
    gather_positions(batch->positions, TOKENS);
    gather_bool(batch->mask, batch->source_mask, ELEMENT_U8, TOKENS);
    gather_f32(batch->logprobs, batch->source_logprobs, ELEMENT_F32, TOKENS);
    gather_mask_f32(batch->logprobs, batch->mask, TOKENS);
    gather_fill_f32(batch->advantages, 0.5f, TOKENS);
}

int main(int argc, char **argv) {
    long rounds = argc == 2 ? strtol(argv[1], NULL, 10) : 0;
    require(rounds > 0, "usage: hot_path ROUNDS");
    struct segment_geometry plan;
    struct segment segment, own;
    struct writer writer;
    struct reader reader;
    static struct sample sample;
    static struct record_ref refs[WINDOW];
    static struct batch batch;
    int fd = memfd_create("shmbus-hot-path", MFD_CLOEXEC);
    char path[64];
    require(segment_plan(CAPACITY, PRODUCERS, 0, &plan), "segment_plan");
    require(segment_create(&segment, fd, &plan) == SEGMENT_OK, "segment_create");
    /* An open file description of its own, as a producer's process has it. */
    snprintf(path, sizeof path, "/proc/self/fd/%d", segment.fd);
    require(segment_open(&own, open(path, O_RDWR | O_CLOEXEC), false) == SEGMENT_OK, "segment_open");
    require(reader_attach(&reader, &segment), "reader_attach");
    require(writer_attach(&writer, &own, "hot path") == WRITER_OK, "writer_attach");
    describe(&sample);
    for (long round = 0; round < rounds; round++) {
        for (uint32_t i = 0; i < WINDOW; i++) {
            if (i % 2 == 0) {
                op_put(&writer, &sample, i);
            } else {
                op_reserve_and_commit(&writer, &sample);
            }
        }
        for (uint32_t i = 0; i < WINDOW; i++) {
            op_read(&reader, &refs[i]);
        }
        /* The first one ends the visit of the lanes, and the others are what a poller does. */
        for (uint32_t i = 0; i < WINDOW; i++) {
            struct record_ref none;
            op_look_in_vain(&reader, &none);
        }
        for (uint32_t i = 0; i < WINDOW; i += 8) {
            op_release_a_group(&reader, &refs[i]);
        }
        op_gather(&batch);
    }
    return 0;
}
