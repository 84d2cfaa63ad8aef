/* A bus of small extents for one story, and the steps of its records. */
#pragma once

#include "ring/segment.h"
#include "support.h"

/* A segment, a description for each process of the story, and their ends. */
struct bus {
    struct segment segment;
    struct segment other;
    struct writer writer;
    struct reader reader;
    struct record_ref ref;
    struct reservation at;
};

/* Tells a story over its own bus. */
static inline void in_a_bus(uint64_t extents, uint32_t producers, void (*story)(struct bus *)) {
    struct bus bus = {0};
    struct segment_geometry plan;
    CHECK(segment_plan(extents * SHMBUS_PAGE, producers, SHMBUS_PAGE, &plan));
    CHECK(segment_create(&bus.segment, memory_file(), &plan) == SHARED_OK);
    bus.other = bus.segment;
    bus.other.fd = reopen(bus.segment.fd);
    story(&bus);
    if (bus.reader.segment != NULL) {
        reader_detach(&bus.reader);
    }
    segment_unmap(&bus.segment);
    close(bus.other.fd);
    close(bus.segment.fd);
}

static inline void claim(struct writer *writer, uint64_t n, struct reservation *at) {
    struct sample sample;
    make_sample(&sample, "prompt", n);
    CHECK(writer_claim(writer, sample.spec.record_bytes, at) == WRITER_OK);
    fill(writer, &sample, at, 7);
}

static inline void put(struct writer *writer, uint64_t n) {
    struct reservation at;
    claim(writer, n, &at);
    writer_publish(writer, &at);
}

static inline void end(struct reader *reader, struct record_ref *ref) {
    const struct record_ref *one = ref;
    intent_log_release(reader->segment, &one, 1, SHMBUS_ACKED, SHMBUS_SPLIT_TRAIN);
    reader_let_go(reader, ref);
}
