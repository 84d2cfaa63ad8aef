/* The least that one trajectory through the ring costs here, between two processes without an
 * interpreter: put by one, found by the other, which polls and never sleeps.
 *
 * stdin: pauses in nanoseconds, one a line. stdout: for each pause the nanoseconds until the reader
 * had the record, from the stamp before the put, and from the one that the writer leaves in the
 * record's header right before it publishes it, by CLOCK_MONOTONIC. Exit status 1 and a message on
 * stderr if anything failed. */
#define _GNU_SOURCE
#include "sample.h"

#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum { MAX_PUTS = 1000000, CAPACITY = 16 << 20, STALL_S = 300 };

/* Pins each of the two to a core of its own, where there are two: a writer that wakes up on the
 * poller's core has to wait for it, or the other way round. */
static void keep_to_core(bool first) {
    cpu_set_t may, one;
    size_t chosen = CPU_SETSIZE;
    require(sched_getaffinity(0, sizeof may, &may) == 0, "sched_getaffinity");
    for (size_t core = 0; core < CPU_SETSIZE; core++) {
        if (CPU_ISSET(core, &may) && (!first || chosen == CPU_SETSIZE)) {
            chosen = core;
        }
    }
    CPU_ZERO(&one);
    CPU_SET(chosen, &one);
    require(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
}

/* Between the processes, beside the ring: the writer's stamps, and that the reader is there. */
struct shared {
    _Atomic uint32_t ready;
    int64_t stamps[MAX_PUTS];
};

static void put_after_pauses(struct shared *shared, struct segment *own, const int64_t *pauses,
                             uint32_t count) {
    static struct sample sample;
    struct writer writer;
    keep_to_core(false);
    require(writer_attach(&writer, own, "ring polled") == WRITER_OK, "writer_attach");
    describe(&sample);
    while (atomic_load_explicit(&shared->ready, memory_order_acquire) == 0) {
    }
    for (uint32_t i = 0; i < count; i++) {
        struct timespec pause = {pauses[i] / 1000000000, pauses[i] % 1000000000};
        nanosleep(&pause, NULL);
        shared->stamps[i] = (int64_t)clock_monotonic_ns();
        put(&writer, &sample, i, 1);
    }
}

int main(void) {
    static int64_t pauses[MAX_PUTS], came[MAX_PUTS], published[MAX_PUTS];
    static struct reader reader;
    struct segment segment, own;
    uint32_t count = 0;
    while (count < MAX_PUTS && scanf("%" SCNd64, &pauses[count]) == 1) {
        count++;
    }
    make_segments(&segment, &own, CAPACITY);
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    require(shared != MAP_FAILED, "mmap");
    alarm(STALL_S);
    pid_t writer = fork();
    require(writer >= 0, "fork");
    if (writer == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        put_after_pauses(shared, &own, pauses, count);
        _exit(0);
    }
    keep_to_core(true);
    require(reader_attach(&reader, &segment), "reader_attach");
    atomic_store_explicit(&shared->ready, 1, memory_order_release);
    for (uint32_t i = 0; i < count;) {
        struct record_ref ref;
        if (reader_next(&reader, &ref) <= 0) {
            continue;
        }
        came[i] = (int64_t)clock_monotonic_ns();
        published[i++] = (int64_t)reader.copy.header.committed_ns;
        const struct record_ref *one = &ref;
        intent_log_release(reader.segment, &one, 1, SHMBUS_ACKED, SHMBUS_SPLIT_TRAIN);
        reader_let_go(&reader, &ref);
    }
    int status = 0;
    require(waitpid(writer, &status, 0) == writer && status == 0, "the writer");
    for (uint32_t i = 0; i < count; i++) {
        printf("%" PRId64 " %" PRId64 "\n", came[i] - shared->stamps[i], came[i] - published[i]);
    }
    return 0;
}
