/* Remains of deaths, set up by hand, and their end by the next owner or reader.
 *
 * Each case is a run found by the explorer (tests/model), cut down to the relevant state. */
#define _GNU_SOURCE
#include "ring/segment.h"
#include "ring/recovery.h"
#include "support.h"

/* A segment of small extents, a description for each process of the story, and their ends. */
struct bus {
    struct segment segment;
    struct segment other;
    struct writer writer;
    struct reader reader;
    struct record_ref ref;
    struct reservation at;
};

/* Tells a story over its own bus. */
static void in_a_bus(uint64_t extents, uint32_t producers, void (*story)(struct bus *)) {
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

/* The kernel's part of a death: a new description holds no lock. */
static void die(struct segment *segment) {
    int fd = reopen(segment->fd);
    close(segment->fd);
    segment->fd = fd;
}

static void claim(struct writer *writer, uint64_t n, struct reservation *at) {
    struct sample sample;
    make_sample(&sample, "prompt", n);
    CHECK(writer_claim(writer, sample.spec.record_bytes, at) == WRITER_OK);
    fill(writer, &sample, at, 7);
}

static void put(struct writer *writer, uint64_t n) {
    struct reservation at;
    claim(writer, n, &at);
    writer_publish(writer, &at);
}

static void end(struct reader *reader, struct record_ref *ref) {
    const struct record_ref *one = ref;
    intent_log_release(reader->segment, &one, 1, SHMBUS_ACKED, SHMBUS_SPLIT_TRAIN);
    reader_let_go(reader, ref);
}

/* An owner dies between the note of its next commit and the commit's effect. Its slot's next owner
 * dies without a commit, long after the first owner's extent became free. */
static void an_intent_ends_with_its_owner(struct bus *bus) {
    CHECK(writer_attach(&bus->writer, &bus->other, "first") == WRITER_OK);
    put(&bus->writer, 10);
    claim(&bus->writer, 10, &bus->at);
    struct producer_slot *slot = &bus->segment.slots[0];
    atomic_store(&slot->commit_ref,
                 (uint64_t)bus->at.place.extent << 40 | bus->at.place.offset / 64);
    atomic_store(&slot->commit_generation, bus->at.place.generation);
    atomic_store(&slot->committing, 2);
    die(&bus->other);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    CHECK(reader_next(&bus->reader, &bus->ref) == 1);
    end(&bus->reader, &bus->ref);
    CHECK(reader_next(&bus->reader, &bus->ref) == 0);
    CHECK(writer_attach(&bus->writer, &bus->other, "second") == WRITER_OK);
    die(&bus->other);
    CHECK(reader_sweep(&bus->reader, RECOVERY_WHOLE) == 1);
    CHECK(atomic_load(&slot->committed) == 1);
    CHECK(reader_next(&bus->reader, &bus->ref) == 0 && bus->reader.corrupt == 0);
}

/* A collector dies between the two copies of a straggler; its successor acknowledges the moved copy
 * and dies before meeting the original. */
static void a_moved_record_is_not_delivered_after_its_acknowledgement(struct bus *bus) {
    struct record_ref moved;
    CHECK(writer_attach(&bus->writer, &bus->other, "writer") == WRITER_OK);
    put(&bus->writer, 10);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    CHECK(reader_next(&bus->reader, &bus->ref) == 1);
    moved = bus->ref;
    struct record_header *first =
        (void *)(segment_extent(&bus->segment, bus->ref.place.extent) + bus->ref.place.offset);
    CHECK(reader_move(&bus->reader, &moved));
    /* The state of a death right after the second copy's publication. */
    atomic_store(&first->state, SHMBUS_COMMITTED);
    struct bus_header *header = bus->segment.header;
    atomic_store(&header->move_from, place_pack(&bus->ref.place) + 1);
    reader_detach(&bus->reader);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    CHECK(reader_next(&bus->reader, &moved) == 1 && bus->reader.copy.header.sequence == 0);
    end(&bus->reader, &moved);
    reader_detach(&bus->reader);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    CHECK(reader_next(&bus->reader, &bus->ref) == 0);
    CHECK(atomic_load(&header->released[SHMBUS_ACKED]) == 1);
}

/* An owner stops between linking a run and noting it. The collector walks on, frees the noted run,
 * and dies; its successor must find the linked run. */
static void a_linked_run_is_found_though_its_owner_has_not_noted_it(struct bus *bus) {
    CHECK(writer_attach(&bus->writer, &bus->other, "writer") == WRITER_OK);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    put(&bus->writer, 3000);
    uint64_t noted = atomic_load(&bus->segment.slots[0].current);
    claim(&bus->writer, 3000, &bus->at);
    uint64_t link = atomic_load(&bus->segment.slots[0].current);
    CHECK(link != noted);
    atomic_store(&bus->segment.slots[0].current, noted);
    CHECK(reader_next(&bus->reader, &bus->ref) == 1);
    end(&bus->reader, &bus->ref);
    CHECK(reader_next(&bus->reader, &bus->ref) == 0);
    CHECK(bus->reader.runs_freed == 1);
    reader_detach(&bus->reader);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    atomic_store(&bus->segment.slots[0].current, link);
    writer_publish(&bus->writer, &bus->at);
    CHECK(reader_next(&bus->reader, &bus->ref) == 1 && bus->reader.copy.header.sequence == 1);
    end(&bus->reader, &bus->ref);
    CHECK(bus->reader.corrupt == 0);
}

/* A producer on a full bus seals its run, to let the reader free it. */
static void a_run_sealed_for_want_of_space_is_freed(struct bus *bus) {
    CHECK(writer_attach(&bus->writer, &bus->other, "writer") == WRITER_OK);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    put(&bus->writer, 100);
    CHECK(reader_next(&bus->reader, &bus->ref) == 1);
    end(&bus->reader, &bus->ref);
    CHECK(reader_next(&bus->reader, &bus->ref) == 0 && bus->reader.runs_freed == 0);
    writer_seal(&bus->writer);
    CHECK(reader_has_events(&bus->reader));
    CHECK(reader_next(&bus->reader, &bus->ref) == 0 && bus->reader.runs_freed == 1);
    CHECK(reader_next(&bus->reader, &bus->ref) == 0 && !reader_has_events(&bus->reader));
}

/* A producer closes: its lane first, then its views get private copies, then its lock goes. */
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

/* Records of a closed producer wait in its first run and in a run behind a gap. The slot's next
 * owner must not note the first run as the last, or the next collector stops there. */
static void stragglers_on_both_sides_of_a_gap_are_found_again(struct bus *bus) {
    struct record_ref refs[4];
    CHECK(writer_attach(&bus->writer, &bus->other, "writer") == WRITER_OK);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    for (int i = 0; i < 4; i++) {
        put(&bus->writer, 3000);
        CHECK(reader_next(&bus->reader, &refs[i]) == 1);
    }
    writer_close(&bus->writer);
    end(&bus->reader, &refs[1]);
    end(&bus->reader, &refs[3]);
    CHECK(reader_next(&bus->reader, &refs[1]) == 0 && bus->reader.runs_freed == 2);
    die(&bus->other);
    reader_sweep(&bus->reader, RECOVERY_WHOLE);
    reader_detach(&bus->reader);
    CHECK(reader_attach(&bus->reader, &bus->segment));
    CHECK(reader_next(&bus->reader, &refs[0]) == 1 && bus->reader.copy.header.sequence == 0);
    CHECK(reader_next(&bus->reader, &refs[2]) == 1 && bus->reader.copy.header.sequence == 2);
    CHECK(reader_next(&bus->reader, &refs[1]) == 0 && bus->reader.corrupt == 0);
}

/* The claim on neighbouring extents may be damaged, or come from a different clock. */
static void a_claim_that_lasts_too_long_keeps_nobody_out(struct bus *bus) {
    uint32_t generation;
    atomic_store(&bus->segment.header->jumbo_until_ns, UINT64_MAX);
    for (int i = 0; i < 7; i++) {
        CHECK(extent_lease(&bus->segment, 0, 1, &generation) != NO_EXTENT);
    }
}

/* Producers fill a bus before its first collector, and go on beside the first and the second. */
static void a_full_bus_keeps_a_place_for_what_is_moved(struct bus *bus) {
    struct sample sample;
    make_sample(&sample, "prompt", 3000);
    CHECK(writer_attach(&bus->writer, &bus->other, "writer") == WRITER_OK);
    for (int i = 0; i < 3; i++) {
        put(&bus->writer, 3000);
    }
    CHECK(writer_claim(&bus->writer, sample.spec.record_bytes, &bus->at) == WRITER_FULL);
    for (int i = 0; i < 2; i++) {
        CHECK(reader_attach(&bus->reader, &bus->segment));
        CHECK(writer_claim(&bus->writer, sample.spec.record_bytes, &bus->at) == WRITER_FULL);
        CHECK(reader_next(&bus->reader, &bus->ref) == 1);
        if (i == 1) {
            CHECK(reader_move(&bus->reader, &bus->ref));
        } else {
            reader_detach(&bus->reader);
        }
    }
}

/* Only a failure may lack its group's size: any other record would belong to no group. */
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
    in_a_bus(4, 1, a_full_bus_keeps_a_place_for_what_is_moved);
    in_a_bus(8, 1, a_claim_that_lasts_too_long_keeps_nobody_out);
    in_a_bus(8, 1, stragglers_on_both_sides_of_a_gap_are_found_again);
    in_a_bus(8, 1, a_closed_producers_views_keep_their_run_until_its_lock_is_gone);
    in_a_bus(8, 1, a_run_sealed_for_want_of_space_is_freed);
    in_a_bus(8, 1, a_linked_run_is_found_though_its_owner_has_not_noted_it);
    in_a_bus(8, 1, a_moved_record_is_not_delivered_after_its_acknowledgement);
    in_a_bus(8, 1, an_intent_ends_with_its_owner);
    puts("recovery_test: passed");
    return 0;
}
