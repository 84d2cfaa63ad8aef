/* Lower bound of a wake-up on this machine: a process wakes another process by a bare futex.
 *
 * stdin: pauses in nanoseconds, a line each. stdout, for each pause: the nanoseconds from the stamp
 * (taken before the store of the word and FUTEX_WAKE) to the return of FUTEX_WAIT in the second
 * process, by CLOCK_MONOTONIC. After a failure: exit status 1 and a message on stderr. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_WAKES 1000000u
#define NS_PER_S INT64_C(1000000000)
/* Longer than the longest pause: a sleeper beyond this limit lost its waker. */
#define STALL_S 30

/* Counter of wakes, in a cache line of its own. The waker writes stamps[i] before the word becomes
 * i + 1; the reader writes came[i]. */
struct shared {
    _Alignas(128) _Atomic uint32_t word;
    _Alignas(128) int64_t stamps[MAX_WAKES];
    int64_t came[MAX_WAKES];
};

static int64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * NS_PER_S + ts.tv_nsec;
}

static int sleep_until_woken(struct shared *shared, uint32_t count) {
    uint32_t seen = 0;
    const struct timespec stall = {STALL_S, 0};
    while (seen < count) {
        uint32_t word = atomic_load_explicit(&shared->word, memory_order_acquire);
        if (word == seen) {
            long rc = syscall(SYS_futex, &shared->word, FUTEX_WAIT, seen, &stall, NULL, 0);
            if (rc != 0 && errno != EAGAIN && errno != EINTR) {
                perror("FUTEX_WAIT");
                return 1;
            }
            continue;
        }
        int64_t came = now_ns();
        while (seen < word) {
            shared->came[seen++] = came;
        }
    }
    return 0;
}

static void wake_after_pauses(struct shared *shared, const int64_t *pauses, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        struct timespec pause = {pauses[i] / NS_PER_S, pauses[i] % NS_PER_S};
        nanosleep(&pause, NULL);
        shared->stamps[i] = now_ns();
        atomic_store_explicit(&shared->word, i + 1, memory_order_release);
        syscall(SYS_futex, &shared->word, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

int main(void) {
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int64_t *pauses = malloc(MAX_WAKES * sizeof *pauses);
    if (shared == MAP_FAILED || pauses == NULL) {
        perror("memory");
        return 1;
    }
    uint32_t count = 0;
    while (count < MAX_WAKES && scanf("%" SCNd64, &pauses[count]) == 1) {
        /* Touched early, to keep page faults of both processes out of the wake-ups. */
        shared->stamps[count] = shared->came[count] = 0;
        count++;
    }
    pid_t sleeper = fork();
    if (sleeper < 0) {
        perror("fork");
        return 1;
    }
    if (sleeper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return sleep_until_woken(shared, count);
    }
    wake_after_pauses(shared, pauses, count);
    int status = 0;
    if (waitpid(sleeper, &status, 0) != sleeper || status != 0) {
        fprintf(stderr, "the sleeper failed, status %d\n", status);
        return 1;
    }
    for (uint32_t i = 0; i < count; i++) {
        printf("%" PRId64 "\n", shared->came[i] - shared->stamps[i]);
    }
    return 0;
}
