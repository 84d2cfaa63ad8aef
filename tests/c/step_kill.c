/* SIGKILL after any instruction: ptrace steps a child through its work by single instructions, and
 * a kill ends the child on the way; an audit judges the remains.
 *
 * SHMBUS_STEP_KILLS sets the deaths of each kind; the default is for a check. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "ring/segment.h"
#include "support.h"
#include "ring/retry_table.h"

#if defined(__SANITIZE_ADDRESS__)
#define DEFAULT_KILLS 3
#else
#define DEFAULT_KILLS 12
#endif
enum { EXTENTS = 24, PRODUCERS = 2, RECORDS = 6, MOST_STEPS = 3000000 };

/* Notes of a child, in memory that outlives the child. */
static struct witness {
    _Atomic uint32_t begun, done;
} *witness;

static struct segment segment, other;
static uint64_t total; /* acknowledged records so far */

static void put_number(struct writer *writer, uint32_t number) {
    static const uint64_t sizes[] = {10, 900, 0, 5000, 100, 2500};
    struct sample sample;
    struct reservation at, given_up;
    make_sample(&sample, "prompt", sizes[number % 6]);
    CHECK(writer_claim(writer, sample.spec.record_bytes, &at) == WRITER_OK);
    fill(writer, &sample, &at, (uint8_t)(number + 1));
    if (number % 3 == 1) {
        writer_reserve(writer, &at);
        CHECK(writer_claim(writer, sample.spec.record_bytes, &given_up) == WRITER_OK);
        fill(writer, &sample, &given_up, 0xEE);
        writer_reserve(writer, &given_up);
        atomic_store(&witness->begun, number + 1);
        writer_commit(writer, &at);
        writer_abort(writer, &given_up);
    } else {
        atomic_store(&witness->begun, number + 1);
        writer_publish(writer, &at);
    }
    atomic_store(&witness->done, number + 1);
    doorbell_ring(writer->segment->header);
}

static void produce(void) {
    struct segment own = segment;
    struct writer writer;
    own.fd = reopen(segment.fd);
    CHECK(writer_attach(&writer, &own, "stepped") == WRITER_OK);
    for (uint32_t i = 0; i < RECORDS; i++) {
        put_number(&writer, i);
    }
    writer_close(&writer);
}

static void end(struct reader *reader, struct record_ref *refs, uint32_t n) {
    const struct record_ref *pointers[RECORDS] = {NULL};
    for (uint32_t i = 0; i < n; i++) {
        pointers[i] = &refs[i];
    }
    intent_log_release(reader->segment, pointers, n, SHMBUS_ACKED, SHMBUS_SPLIT_TRAIN);
    for (uint32_t i = 0; i < n; i++) {
        reader_let_go(reader, &refs[i]);
    }
}

/* Reads every record, moves one out of the way, and acknowledges in two halves. */
static void collect(void) {
    struct segment own = segment;
    struct reader reader;
    struct record_ref refs[RECORDS];
    own.fd = reopen(segment.fd);
    CHECK(file_lock_take(own.fd, SHMBUS_LOCK_COLLECTOR) == LOCK_TAKEN);
    CHECK(reader_attach(&reader, &own));
    for (uint32_t i = 0; i < RECORDS; i++) {
        CHECK(reader_next(&reader, &refs[i]) == 1);
    }
    /* The ring may lack the room. */
    (void)reader_move(&reader, &refs[RECORDS / 2]);
    for (uint32_t half = 0; half < 2; half++) {
        atomic_store(&witness->begun, half + 1);
        end(&reader, refs + half * RECORDS / 2, RECORDS / 2);
        atomic_store(&witness->done, half + 1);
    }
}

/* Steps a child through `work`, ends it after so many instructions; returns the count. */
static uint64_t step(void (*work)(void), uint64_t kill_after) {
    atomic_store(&witness->begun, 0);
    atomic_store(&witness->done, 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0);
        raise(SIGSTOP);
        work();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSTOPPED(status));
    uint64_t steps = 0;
    while (steps < kill_after) {
        CHECK(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0);
        CHECK(waitpid(child, &status, 0) == child);
        if (WIFEXITED(status)) {
            CHECK(WEXITSTATUS(status) == 0);
            return steps;
        }
        CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP);
        CHECK(++steps < MOST_STEPS);
    }
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    return steps;
}

/* Takes every record; returns their count. */
static uint32_t drain(struct reader *reader, uint64_t life, bool ordered) {
    struct record_ref ref;
    uint32_t n = 0;
    for (;;) {
        int found = reader_next(reader, &ref);
        CHECK(found >= 0);
        if (found == 0) {
            /* A reservation of a gone owner ends on a second look. */
            if (!reader_has_events(reader)) {
                break;
            }
            continue;
        }
        const struct record_header *header = &reader->copy.header;
        const uint8_t *x = segment_extent(&segment, ref.place.extent) + ref.place.offset;
        CHECK(header->producer_id >= life);
        CHECK(!ordered || header->sequence == n);
        for (uint64_t i = 0; i < reader->copy.shape[1]; i++) {
            CHECK(x[reader->copy.shape[0] + i] == (uint8_t)(header->sequence % RECORDS + 1));
        }
        end(reader, &ref, 1);
        n++;
    }
    CHECK(reader->corrupt == 0);
    return n;
}

static void audit(struct reader *reader, uint32_t held_by_writer) {
    uint64_t committed;
    CHECK(reader_count_unread(reader, &committed) == 0);
    CHECK(committed == total);
    CHECK(atomic_load(&segment.header->released[SHMBUS_ACKED]) == total);
    CHECK(extent_count_free(&segment) + 1 + held_by_writer >= EXTENTS);
}

static uint64_t random_below(uint64_t *random, uint64_t bound) {
    return next_random(random) % bound;
}

static void a_producer_may_die_after_any_instruction(uint64_t *random, unsigned kills) {
    struct reader reader;
    uint64_t whole = 0;
    for (unsigned i = 0; i <= kills; i++) {
        uint64_t life = atomic_load(&segment.header->next_producer_id);
        uint64_t steps = step(produce, i == 0 ? UINT64_MAX : random_below(random, whole));
        whole = i == 0 ? steps : whole;
        uint32_t done = atomic_load(&witness->done), begun = atomic_load(&witness->begun);
        CHECK(file_lock_take(segment.fd, SHMBUS_LOCK_COLLECTOR) == LOCK_TAKEN);
        CHECK(reader_attach(&reader, &segment));
        uint32_t n = drain(&reader, life, true);
        CHECK(n == done || n == begun);
        total += n;
        audit(&reader, 0);
        reader_detach(&reader);
        file_lock_drop(segment.fd, SHMBUS_LOCK_COLLECTOR);
    }
    printf("%u producers ended within %llu instructions\n", kills, (unsigned long long)whole);
}

static void a_collector_may_die_after_any_instruction(uint64_t *random, unsigned kills) {
    struct reader reader;
    struct writer writer;
    uint64_t whole = 0;
    CHECK(writer_attach(&writer, &other, "writer") == WRITER_OK);
    for (unsigned i = 0; i <= kills; i++) {
        for (uint32_t r = 0; r < RECORDS; r++) {
            put_number(&writer, r);
        }
        uint64_t steps = step(collect, i == 0 ? UINT64_MAX : random_below(random, whole));
        whole = i == 0 ? steps : whole;
        uint32_t done = atomic_load(&witness->done), begun = atomic_load(&witness->begun);
        CHECK(file_lock_take(segment.fd, SHMBUS_LOCK_COLLECTOR) == LOCK_TAKEN);
        CHECK(reader_attach(&reader, &segment));
        uint32_t n = drain(&reader, 0, false);
        CHECK(n == RECORDS - done * RECORDS / 2 || n == RECORDS - begun * RECORDS / 2);
        total += RECORDS;
        writer_seal(&writer);
        CHECK(drain(&reader, 0, false) == 0);
        audit(&reader, 1);
        reader_detach(&reader);
        file_lock_drop(segment.fd, SHMBUS_LOCK_COLLECTOR);
    }
    printf("%u collectors ended within %llu instructions\n", kills, (unsigned long long)whole);
}

/* ---- retry requests ---- */

enum { ASKED_ROW = 0, OTHER_ROW = 1, TAKER = 5, SUCCESSOR = 6 };

static void make_request(struct retry_entry *request, uint64_t number) {
    memset(request, 0, sizeof *request);
    request->number = number;
    request->round = (int64_t)number;
    request->group_size = 16;
    request->index = (uint32_t)(number % 16);
    request->attempt = (uint32_t)number;
    request->id_bytes = (uint16_t)(number % SHMBUS_MAX_ID_BYTES + 1);
    request->reason_bytes = (uint16_t)(number % SHMBUS_RETRY_REASON_BYTES);
    memset(request->id, 'a' + (int)(number % 26), request->id_bytes);
    memset(request->reason, 'A' + (int)(number % 26), request->reason_bytes);
}

static void publish(uint32_t row, uint64_t number) {
    struct retry_entry request;
    make_request(&request, number);
    retry_publish(&segment, row, &request);
}

/* The number of the entry's request, checked whole; 0 without a request. */
static uint64_t asked(uint32_t row, uint64_t *claimant) {
    struct retry_entry found, expected;
    if (!retry_read(&segment, row, &found)) {
        return 0;
    }
    make_request(&expected, found.number);
    expected.claim = *claimant = found.claim;
    expected.crc = found.crc;
    CHECK(memcmp(&found, &expected, sizeof found) == 0);
    return found.number;
}

/* Requests 1 to RECORDS, each in place of the last, some withdrawn between. */
static void ask(void) {
    for (uint32_t number = 1; number <= RECORDS; number++) {
        atomic_store(&witness->begun, number);
        publish(ASKED_ROW, number);
        atomic_store(&witness->done, number);
        if (number % 3 == 0) {
            retry_withdraw(&segment, ASKED_ROW);
            publish(OTHER_ROW, number);
        }
    }
}

/* Claims a request, gives the claim back, claims again for good. */
static void take(void) {
    uint64_t claimant;
    struct retry_entry copy;
    for (uint32_t turn = 1; turn <= 2; turn++) {
        uint64_t number = asked(ASKED_ROW, &claimant);
        atomic_store(&witness->begun, turn);
        CHECK(retry_claim(&segment, ASKED_ROW, number, TAKER, &copy));
        atomic_store(&witness->done, turn);
        CHECK(turn == 2 || retry_unclaim(&segment, ASKED_ROW, number, TAKER));
    }
}

/* Over any remains the next collector publishes in this entry, and a producer claims. */
static void check_row_serves(uint32_t row, uint64_t number) {
    uint64_t claimant;
    struct retry_entry copy;
    publish(row, number);
    CHECK(asked(row, &claimant) == number && claimant == SHMBUS_RETRY_FREE);
    CHECK(retry_claim(&segment, row, number, SUCCESSOR, &copy));
    CHECK(!retry_claim(&segment, row, number, TAKER, &copy));
    retry_withdraw(&segment, row);
}

static void who_asks_or_takes_may_die_after_any_instruction(uint64_t *random, unsigned kills) {
    uint64_t whole = 0, steps, claimant = 0;
    for (unsigned i = 0; i <= kills; i++) {
        steps = step(ask, i == 0 ? UINT64_MAX : random_below(random, whole));
        whole = i == 0 ? steps : whole;
        uint64_t number = asked(ASKED_ROW, &claimant);
        CHECK(number == 0 || number == atomic_load(&witness->begun) ||
              number == atomic_load(&witness->done));
        CHECK(number == 0 || claimant == SHMBUS_RETRY_FREE);
        CHECK(asked(OTHER_ROW, &claimant) % 3 == 0);
        check_row_serves(ASKED_ROW, 100 + i);
        check_row_serves(OTHER_ROW, 100 + i);
    }
    printf("%u that asked ended within %llu instructions\n", kills, (unsigned long long)whole);
    for (unsigned i = 0; i <= kills; i++) {
        publish(ASKED_ROW, 1 + i);
        steps = step(take, i == 0 ? UINT64_MAX : random_below(random, whole));
        whole = i == 0 ? steps : whole;
        uint32_t begun = atomic_load(&witness->begun), done = atomic_load(&witness->done);
        CHECK(asked(ASKED_ROW, &claimant) == 1 + i);
        CHECK(claimant == SHMBUS_RETRY_FREE ? done < 2 : claimant == TAKER + 1 && begun > 0);
        check_row_serves(ASKED_ROW, 2 + i);
    }
    printf("%u that took ended within %llu instructions\n", kills, (unsigned long long)whole);
}

int main(void) {
    uint64_t random = test_seed();
    const char *given = getenv("SHMBUS_STEP_KILLS");
    unsigned kills = given ? (unsigned)strtoul(given, NULL, 10) : DEFAULT_KILLS;
    struct segment_geometry plan;
    witness =
        mmap(NULL, sizeof *witness, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(witness != MAP_FAILED);
    CHECK(segment_plan(EXTENTS * SHMBUS_PAGE, PRODUCERS, SHMBUS_PAGE, &plan));
    CHECK(segment_create(&segment, memory_file(), &plan) == SHARED_OK);
    other = segment;
    other.fd = reopen(segment.fd);
    a_producer_may_die_after_any_instruction(&random, kills);
    a_collector_may_die_after_any_instruction(&random, kills);
    who_asks_or_takes_may_die_after_any_instruction(&random, kills);
    segment_unmap(&segment);
    close(segment.fd);
    close(other.fd);
    puts("step_kill: passed");
    return 0;
}
