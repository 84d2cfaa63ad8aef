/* When a reader wakes producers that wait for space: not for each run that it frees, and not too late. */
#define _GNU_SOURCE
#include "bus.h"

#define EXTENTS 64u
#define WORTH_WAKING (EXTENTS / 8)

static void fill_bus(struct writer *writer) {
    struct sample sample;
    struct reservation at;
    make_sample(&sample, "prompt", SHMBUS_PAGE / 2);
    while (writer_claim(writer, sample.spec.record_bytes, &at) == WRITER_OK) {
        fill(writer, &sample, &at, 7);
        writer_publish(writer, &at);
    }
    writer_seal(writer);
}

/* Takes and acknowledges records until so many runs were freed. */
static void free_runs(struct reader *reader, uint64_t runs) {
    uint64_t wanted = reader->runs_freed + runs;
    struct record_ref ref;
    while (reader->runs_freed < wanted) {
        CHECK(reader_next(reader, &ref) == 1);
        end(reader, &ref);
    }
}

static uint32_t bell(const struct reader *reader) {
    return atomic_load(&reader->segment->header->space_bell.count);
}

static void waiters_are_woken_for_an_eighth_of_the_bus(struct reader *reader) {
    uint32_t before = bell_announce(&reader->segment->header->space_bell);
    free_runs(reader, WORTH_WAKING - 1);
    CHECK(bell(reader) == before);
    free_runs(reader, 1);
    CHECK(bell(reader) != before);
}

static void a_reader_that_is_about_to_sleep_wakes_them_for_less(struct reader *reader) {
    uint32_t before = bell_announce(&reader->segment->header->space_bell);
    free_runs(reader, 1);
    CHECK(bell(reader) == before);
    reader_has_events(reader);
    CHECK(bell(reader) != before);
}

static void nobody_is_woken_where_nobody_waits(struct reader *reader) {
    atomic_store(&reader->segment->header->space_bell.wanted, 0);
    uint32_t before = bell(reader);
    free_runs(reader, 2 * WORTH_WAKING);
    CHECK(bell(reader) == before);
}

static void waiters_are_woken_in_time(struct bus *bus) {
    CHECK(writer_attach(&bus->writer, &bus->other, "writer") == WRITER_OK);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    fill_bus(&bus->writer);
    waiters_are_woken_for_an_eighth_of_the_bus(&bus->reader);
    a_reader_that_is_about_to_sleep_wakes_them_for_less(&bus->reader);
    nobody_is_woken_where_nobody_waits(&bus->reader);
}

int main(void) {
    in_a_bus(EXTENTS, 1, waiters_are_woken_in_time);
    puts("space_test: passed");
    return 0;
}
