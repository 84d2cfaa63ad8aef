/* The ring between threads over one mapping: order, wrap, reservations. */
#define _GNU_SOURCE
#include <pthread.h>

#include "base/clock.h"
#include "ring/segment.h"
#include "ring/recovery.h"
#include "support.h"

enum { WRITERS = 3, RECORDS = 20000 };

static void make_segment(struct segment *segment, int fd, uint64_t capacity) {
    struct segment_geometry plan;
    CHECK(segment_plan(capacity, 8, 0, &plan));
    CHECK(segment_create(segment, fd, &plan) == SHARED_OK);
}

struct worker {
    int fd;
    unsigned number;
    uint64_t seed;
};

static void claim_waiting(struct writer *writer, uint64_t bytes, struct reservation *at) {
    while (writer_claim(writer, bytes, at) != WRITER_OK) {
        writer_seal(writer);
        uint32_t ticket = bell_announce(&writer->segment->header->space_bell);
        doorbell_ring(writer->segment->header);
        if (writer_claim(writer, bytes, at) == WRITER_OK) {
            return;
        }
        bell_wait(&writer->segment->header->space_bell, ticket, 10000000);
    }
}

static void *work(void *argument) {
    struct worker *me = argument;
    struct segment segment;
    struct writer writer;
    int fd = reopen(me->fd);
    CHECK(segment_open(&segment, fd, false) == SHARED_OK);
    CHECK(writer_attach(&writer, &segment, "worker") == WRITER_OK);
    uint64_t random = me->seed;
    for (uint32_t i = 0; i < RECORDS; i++) {
        struct sample sample;
        struct reservation at;
        make_sample(&sample, "prompt", next_random(&random) % 3000);
        sample.spec.policy_version = i;
        claim_waiting(&writer, sample.spec.record_bytes, &at);
        fill(&writer, &sample, &at, (uint8_t)i);
        switch (next_random(&random) % 4) {
        case 0:
            writer_reserve(&writer, &at);
            writer_commit(&writer, &at);
            break;
        case 1: {
            struct reservation spare;
            writer_publish(&writer, &at);
            claim_waiting(&writer, sample.spec.record_bytes, &spare);
            fill(&writer, &sample, &spare, 255);
            writer_reserve(&writer, &spare);
            writer_abort(&writer, &spare);
            break;
        }
        default:
            writer_publish(&writer, &at);
        }
        doorbell_ring(segment.header);
    }
    writer_close(&writer);
    close(segment.fd);
    segment_unmap(&segment);
    return NULL;
}

static void check_record(const struct reader *reader, const struct record_ref *ref,
                         uint64_t expected) {
    const struct record_header *header = &reader->copy.header;
    CHECK(header->sequence == expected);
    CHECK(header->policy_version == (int64_t)expected);
    const uint8_t *x = segment_extent(reader->segment, ref->place.extent) + ref->place.offset +
                       reader->copy.shape[0];
    for (uint64_t i = 0; i < reader->copy.shape[1]; i++) {
        CHECK(x[i] == (uint8_t)expected);
    }
}

static void every_record_arrives_once_in_order(uint64_t *random) {
    struct segment segment;
    int fd = memory_file();
    make_segment(&segment, fd, 1 << 20);
    struct reader reader;
    CHECK(reader_attach(&reader, &segment));
    struct worker workers[WRITERS];
    pthread_t threads[WRITERS];
    for (unsigned i = 0; i < WRITERS; i++) {
        workers[i] = (struct worker){segment.fd, i, next_random(random) | 1};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    uint64_t next[WRITERS + 4] = {0};
    for (uint32_t got = 0; got < WRITERS * RECORDS;) {
        struct record_ref ref;
        int found = reader_next(&reader, &ref);
        CHECK(found >= 0);
        if (found == 0) {
            doorbell_announce(segment.header);
            /* Reports freed space, too, before its sleep. */
            if (reader_has_events(&reader)) {
                doorbell_stay(segment.header);
            } else {
                doorbell_sleep(segment.header, 100000000);
            }
            continue;
        }
        uint64_t producer = reader.copy.header.producer_id;
        CHECK(producer < WRITERS + 4);
        check_record(&reader, &ref, next[producer]++);
        const struct record_ref *one = &ref;
        intent_log_release(reader.segment, &one, 1, SHMBUS_ACKED, SHMBUS_SPLIT_TRAIN);
        reader_let_go(&reader, &ref);
        got++;
    }
    for (unsigned i = 0; i < WRITERS; i++) {
        pthread_join(threads[i], NULL);
    }
    struct record_ref none;
    CHECK(reader_next(&reader, &none) == 0);
    reader_sweep(&reader, RECOVERY_WHOLE);
    CHECK(reader_next(&reader, &none) == 0);
    /* Everything is free again but the extent kept ready by the reader. */
    CHECK(extent_count_free(&segment) >= segment.extent_count - 1);
    CHECK(atomic_load(&segment.header->released[SHMBUS_ACKED]) == WRITERS * RECORDS);
    uint64_t committed;
    CHECK(reader_count_unread(&reader, &committed) == 0 && committed == WRITERS * RECORDS);
    reader_detach(&reader);
    segment_unmap(&segment);
    close(segment.fd);
}

static void put(struct writer *writer, const char *id, uint64_t n, uint8_t value) {
    struct sample sample;
    struct reservation at;
    make_sample(&sample, id, n);
    CHECK(writer_claim(writer, sample.spec.record_bytes, &at) == WRITER_OK);
    fill(writer, &sample, &at, value);
    writer_publish(writer, &at);
}

/* The cost of polling an idle bus follows from its producers, not from its slots. */
static void lanes_without_a_producer_are_not_looked_at(void) {
    struct segment segment;
    struct writer writers[2];
    struct reader reader;
    struct record_ref ref;
    int fd = memory_file(), fds[2];
    make_segment(&segment, fd, 1 << 20);
    struct segment own[2] = {segment, segment};
    for (int i = 0; i < 2; i++) {
        own[i].fd = fds[i] = reopen(segment.fd);
    }
    CHECK(writer_attach(&writers[0], &own[0], "first") == WRITER_OK);
    put(&writers[0], "prompt", 10, 1);
    CHECK(reader_attach(&reader, &segment));
    CHECK(reader_next(&reader, &ref) == 1);
    CHECK(reader_next(&reader, &ref) == 0);
    CHECK(reader_next(&reader, &ref) == 0 && reader.active_count == 1);
    CHECK(writer_attach(&writers[1], &own[1], "second") == WRITER_OK);
    put(&writers[1], "prompt", 10, 2);
    put(&writers[0], "prompt", 10, 3);
    CHECK(reader_next(&reader, &ref) == 1 && reader_next(&reader, &ref) == 1);
    CHECK(reader_next(&reader, &ref) == 0 && reader.active_count == 2 && reader.corrupt == 0);
    reader_detach(&reader);
    segment_unmap(&segment);
    close(fds[0]);
    close(fds[1]);
    close(segment.fd);
}

int main(void) {
    uint64_t random = test_seed();
    every_record_arrives_once_in_order(&random);
    lanes_without_a_producer_are_not_looked_at();
    puts("ring_test: passed");
    return 0;
}
