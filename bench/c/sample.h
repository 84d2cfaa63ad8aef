/* Trajectories of the programs in this folder: three byte fields, over the ring alone. Payloads are
 * small, to leave their copy out of the measurement. */
#ifndef SHMBUS_BENCH_SAMPLE_H
#define SHMBUS_BENCH_SAMPLE_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ring/reader.h"
#include "base/clock.h"
#include "ring/segment.h"
#include "ring/intent_log.h"
#include "ring/writer.h"

enum { PAYLOAD = 64, FIELDS = 3, PRODUCERS = 64 };

static inline void require(bool condition, const char *what) {
    if (!condition) {
        fprintf(stderr, "%s failed\n", what);
        exit(1);
    }
}

/* A segment in memory with a second descriptor, as in a producer's process. */
static inline void make_segments(struct segment *segment, struct segment *own, uint64_t capacity) {
    struct segment_geometry plan;
    char path[64];
    int fd = memfd_create("shmbus-bench", MFD_CLOEXEC);
    require(segment_plan(capacity, PRODUCERS, 0, &plan), "segment_plan");
    require(segment_create(segment, fd, &plan) == SHARED_OK, "segment_create");
    snprintf(path, sizeof path, "/proc/self/fd/%d", segment->fd);
    require(segment_open(own, open(path, O_RDWR | O_CLOEXEC), false) == SHARED_OK, "segment_open");
}

struct sample {
    struct record_spec spec;
    uint64_t shape[2 * FIELDS];
    uint64_t field_bytes[FIELDS];
    uint8_t field_ndim[FIELDS];
    uint8_t schema[FIELDS * (sizeof(struct schema_entry) + 4)];
};

static inline void describe(struct sample *sample) {
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

static inline void put(struct writer *writer, struct sample *sample, uint32_t index,
                       uint32_t group_size) {
    static const uint8_t payload[PAYLOAD];
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
                                        .group_size = group_size,
                                        .index = index % group_size,
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

#endif
