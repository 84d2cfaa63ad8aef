/* Remains of deaths, set up by hand, and their end by the next owner or reader.
 *
 * The explorer (tests/model) searches the remaining deaths. */
#define _GNU_SOURCE
#include "bus.h"
#include "ring/recovery.h"

/* The kernel's part of a death: a new description holds no lock. */
static void die(struct segment *segment) {
    int fd = reopen(segment->fd);
    close(segment->fd);
    segment->fd = fd;
}

/* A producer closes the lane, gives views private copies, and lets the lock go, in this order. */
static void a_closed_producers_views_keep_their_run_until_its_lock_is_gone(struct bus *bus) {
    CHECK(writer_attach(&bus->writer, &bus->other, "writer") == WRITER_OK);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    claim(&bus->writer, 100, &bus->at);
    writer_reserve(&bus->writer, &bus->at);
    writer_pin(&bus->writer, &bus->at);
    writer_commit(&bus->writer, &bus->at);
    writer_close(&bus->writer);
    CHECK(reader_next(&bus->reader, &bus->ref) == 1);
    end(&bus->reader, &bus->ref);
    CHECK(reader_next(&bus->reader, &bus->ref) == 0);
    reader_sweep(&bus->reader, RECOVERY_WHOLE);
    CHECK(bus->reader.runs_freed == 0);
    writer_unpin(&bus->other, &bus->at);
    die(&bus->other);
    reader_sweep(&bus->reader, RECOVERY_WHOLE);
    CHECK(reader_next(&bus->reader, &bus->ref) == 0);
    CHECK(bus->reader.runs_freed == 1);
}

/* The claim on neighbouring extents may be damaged, or come from a different clock. */
static void a_claim_that_lasts_too_long_keeps_nobody_out(struct bus *bus) {
    uint32_t generation;
    atomic_store(&bus->segment.header->jumbo_until_ns, UINT64_MAX);
    for (int i = 0; i < 7; i++) {
        CHECK(extent_lease(&bus->segment, 0, 1, &generation) != NO_EXTENT);
    }
}

/* Only a failure may lack the size of a group: a sample would belong to no group. */
static void a_sample_without_the_size_of_its_group_is_corrupt(struct bus *bus) {
    CHECK(writer_attach(&bus->writer, &bus->other, "writer") == WRITER_OK);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    for (uint32_t failed = 0; failed < 2; failed++) {
        claim(&bus->writer, 100, &bus->at);
        record_write_frame(bus->at.record, &bus->at.place, bus->at.bytes, bus->writer.producer_id,
                           bus->writer.slot_index,
                           SHMBUS_FLAG_NO_SIZE | (failed ? SHMBUS_FLAG_FAILED : 0));
        writer_publish(&bus->writer, &bus->at);
        CHECK(reader_next(&bus->reader, &bus->ref) == (int)failed && bus->reader.corrupt == 1);
    }
}

/* An owner attaches, commits or only reserves a record, and dies. Its successor frees the slot, and
 * dies before activity there. The reader looked neither before nor between. */
static void what_a_dead_successor_freed_is_read(struct bus *bus, bool committed) {
    CHECK(reader_attach(&bus->reader, &bus->segment));
    CHECK(reader_next(&bus->reader, &bus->ref) == 0 && reader_next(&bus->reader, &bus->ref) == 0);
    CHECK(writer_attach(&bus->writer, &bus->other, "owner") == WRITER_OK);
    if (committed) {
        put(&bus->writer, 10);
    } else {
        claim(&bus->writer, 10, &bus->at);
        writer_reserve(&bus->writer, &bus->at);
    }
    die(&bus->other);
    recover_producer(&bus->other, bus->writer.slot_index);
    CHECK(reader_has_events(&bus->reader));
    if (committed) {
        CHECK(reader_next(&bus->reader, &bus->ref) == 1);
        end(&bus->reader, &bus->ref);
    }
    CHECK(reader_next(&bus->reader, &bus->ref) == 0 && reader_next(&bus->reader, &bus->ref) == 0);
    CHECK(bus->reader.runs_freed == 1);
}

static void what_a_dead_successor_freed_of_a_commit_is_read(struct bus *bus) {
    what_a_dead_successor_freed_is_read(bus, true);
}

static void what_a_dead_successor_freed_of_a_reservation_is_read(struct bus *bus) {
    what_a_dead_successor_freed_is_read(bus, false);
}

int main(void) {
    in_a_bus(4, 1, a_sample_without_the_size_of_its_group_is_corrupt);
    in_a_bus(8, 2, what_a_dead_successor_freed_of_a_commit_is_read);
    in_a_bus(8, 2, what_a_dead_successor_freed_of_a_reservation_is_read);
    in_a_bus(8, 1, a_claim_that_lasts_too_long_keeps_nobody_out);
    in_a_bus(8, 1, a_closed_producers_views_keep_their_run_until_its_lock_is_gone);
    puts("recovery_test: passed");
    return 0;
}
