/* The ring between threads over one mapping: order, wrap, reservations. */
#define _GNU_SOURCE
#include <pthread.h>

#include "base/clock.h"
#include "bus.h"
#include "ring/recovery.h"

enum { WRITERS = 3, RECORDS = 20000, EXTENTS = 256, PRODUCERS = 8 };

static uint64_t seed;

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

static void every_record_arrives_once_in_order(struct bus *bus) {
    struct segment *segment = &bus->segment;
    struct reader *reader = &bus->reader;
    CHECK(reader_attach(reader, segment));
    struct worker workers[WRITERS];
    pthread_t threads[WRITERS];
    for (unsigned i = 0; i < WRITERS; i++) {
        workers[i] = (struct worker){segment->fd, i, next_random(&seed) | 1};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    uint64_t next[WRITERS + 4] = {0};
    for (uint32_t got = 0; got < WRITERS * RECORDS;) {
        int found = reader_next(reader, &bus->ref);
        CHECK(found >= 0);
        if (found == 0) {
            doorbell_announce(segment->header);
            /* Reports freed space, too, before its sleep. */
            if (reader_has_events(reader)) {
                doorbell_stay(segment->header);
            } else {
                doorbell_sleep(segment->header, 100000000);
            }
            continue;
        }
        uint64_t producer = reader->copy.header.producer_id;
        CHECK(producer < WRITERS + 4);
        check_record(reader, &bus->ref, next[producer]++);
        end(reader, &bus->ref);
        got++;
    }
    for (unsigned i = 0; i < WRITERS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK(reader_next(reader, &bus->ref) == 0);
    reader_sweep(reader, RECOVERY_WHOLE);
    CHECK(reader_next(reader, &bus->ref) == 0);
    /* Everything is free again but the extent kept ready by the reader. */
    CHECK(extent_count_free(segment) >= segment->extent_count - 1);
    CHECK(atomic_load(&segment->header->released[SHMBUS_ACKED]) == WRITERS * RECORDS);
    uint64_t committed;
    CHECK(reader_count_unread(reader, &committed) == 0 && committed == WRITERS * RECORDS);
}

/* The cost of polling an idle bus follows from its producers, not from its slots. */
static void lanes_without_a_producer_are_not_looked_at(struct bus *bus) {
    struct reader *reader = &bus->reader;
    struct segment late = bus->segment;
    struct writer second;
    late.fd = reopen(bus->segment.fd);
    CHECK(writer_attach(&bus->writer, &bus->other, "first") == WRITER_OK);
    put(&bus->writer, 10);
    CHECK(reader_attach(reader, &bus->segment));
    CHECK(reader_next(reader, &bus->ref) == 1);
    CHECK(reader_next(reader, &bus->ref) == 0);
    CHECK(reader_next(reader, &bus->ref) == 0 && reader->active_count == 1);
    CHECK(writer_attach(&second, &late, "second") == WRITER_OK);
    put(&second, 10);
    put(&bus->writer, 10);
    CHECK(reader_next(reader, &bus->ref) == 1 && reader_next(reader, &bus->ref) == 1);
    CHECK(reader_next(reader, &bus->ref) == 0 && reader->active_count == 2);
    CHECK(reader->corrupt == 0);
    close(late.fd);
}

int main(void) {
    seed = test_seed();
    in_a_bus(EXTENTS, PRODUCERS, every_record_arrives_once_in_order);
    in_a_bus(EXTENTS, PRODUCERS, lanes_without_a_producer_are_not_looked_at);
    puts("ring_test: passed");
    return 0;
}
