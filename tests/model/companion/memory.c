/* The explorer's loads, stores, futexes and locks of the subject.
 *
 * Stores arrive in the order of their process; a store short of sequential consistency may be late,
 * until its process makes a stronger step. The model allows less than C11, so findings are real.
 * Futexes and locks order everything, like the kernel's. */
#include "companion.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#include "hooks_api.h"
#include "base/file_lock.h"

static uint32_t offset_of(const volatile void *at) {
    uintptr_t base = (uintptr_t)world.memory, address = (uintptr_t)at;
    bool inside = running >= 0 && address >= base && address < base + MEMORY_BYTES;
    return inside ? (uint32_t)(address - base) : NOWHERE;
}

static struct process *self(void) {
    return &world.processes[running];
}

uint64_t memory_hash(void) {
    uint64_t hash = 7;
    for (size_t at = 0; at < MEMORY_BYTES; at += 8) {
        uint64_t word;
        memcpy(&word, world.memory + at, 8);
        hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 32;
    }
    return hash;
}

void memory_drain(int process) {
    struct process *p = &world.processes[process];
    for (uint32_t i = 0; i < p->late_count; i++) {
        memcpy(world.memory + p->late[i].offset, &p->late[i].value, p->late[i].size);
    }
    memset(p->late, 0, sizeof p->late);
    p->late_count = 0;
}

uint64_t model_load(const volatile void *at, size_t size, int order, const char *where) {
    (void)order;
    uint32_t offset = offset_of(at);
    uint64_t value = 0;
    if (offset == NOWHERE) {
        memcpy(&value, (const void *)at, size);
        return value;
    }
    engine_yield(where, false);
    struct process *p = self();
    memcpy(&value, world.memory + offset, size);
    for (uint32_t i = 0; i < p->late_count; i++) {
        if (p->late[i].offset == offset) {
            value = p->late[i].value;
        }
    }
    engine_observe(value);
    return value;
}

void model_store(volatile void *at, size_t size, uint64_t value, int order, const char *where) {
    uint32_t offset = offset_of(at);
    if (offset == NOWHERE) {
        memcpy((void *)at, &value, size);
        return;
    }
    engine_yield(where, order != memory_order_seq_cst);
    struct process *p = self();
    if (p->variant == V_DELAY_STORE && p->late_count < DELAYED) {
        p->late[p->late_count++] = (struct late_store){value, offset, (uint32_t)size};
        return;
    }
    memory_drain(running);
    memcpy(world.memory + offset, &value, size);
}

uint64_t model_rmw(volatile void *at, size_t size, enum model_rmw kind, uint64_t operand, int order,
                   const char *where) {
    (void)order;
    uint32_t offset = offset_of(at);
    if (offset == NOWHERE) {
        engine_fail("%s: a private read-modify-write", where);
    }
    engine_yield(where, false);
    memory_drain(running);
    uint64_t before = 0;
    memcpy(&before, world.memory + offset, size);
    uint64_t after = kind == MODEL_ADD   ? before + operand
                     : kind == MODEL_SUB ? before - operand
                     : kind == MODEL_AND ? before & operand
                                         : operand;
    memcpy(world.memory + offset, &after, size);
    engine_observe(before);
    return before;
}

_Bool model_compare_exchange(volatile void *at, size_t size, uint64_t *expected, uint64_t desired,
                             int order, int failure_order, const char *where) {
    (void)at, (void)size, (void)expected, (void)desired, (void)order, (void)failure_order;
    engine_fail("%s: the subject has no compare-and-swap", where);
}

void model_fence(int order, const char *where) {
    (void)order;
    engine_yield(where, false);
    memory_drain(running);
    engine_observe(1); /* tells the state from that before the fence */
}

static void copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    if (offset_of(from) == NOWHERE) {
        return;
    }
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, (const uint8_t *)from + at, bytes - at < 8 ? bytes - at : 8);
        engine_observe(word);
    }
}

/* A copy out of or into shared memory is two steps. */
void *model_memcpy(void *to, const void *from, size_t bytes) {
    size_t half = bytes / 2;
    if (offset_of(to) != NOWHERE || offset_of(from) != NOWHERE) {
        copy(to, from, half);
        engine_yield("memcpy", false);
        copy((uint8_t *)to + half, (const uint8_t *)from + half, bytes - half);
        return to;
    }
    copy(to, from, bytes);
    return to;
}

void *model_malloc(size_t bytes) {
    engine_fail("the subject allocates %zu bytes", bytes);
}
void *model_calloc(size_t count, size_t bytes) {
    engine_fail("the subject allocates %zu bytes", count * bytes);
}
void *model_realloc(void *block, size_t bytes) {
    (void)block;
    engine_fail("the subject allocates %zu bytes", bytes);
}
int model_clock_gettime(clockid_t clock, struct timespec *ts) {
    (void)clock;
    *ts = (struct timespec){1, 0};
    return 0;
}

/* ---- futexes ---- */

static long wake(uint32_t offset) {
    long woken = 0;
    for (int i = 0; i < PROCESSES; i++) {
        struct process *p = &world.processes[i];
        if (p->state == P_BLOCKED && p->futex == offset) {
            p->state = P_READY;
            p->wait_result = 0;
            woken++;
        }
    }
    return woken;
}

long model_syscall(long number, ...) {
    va_list arguments;
    va_start(arguments, number);
    _Atomic uint32_t *word = va_arg(arguments, _Atomic uint32_t *);
    int verb = va_arg(arguments, int);
    uint32_t value = va_arg(arguments, uint32_t);
    va_end(arguments);
    uint32_t offset = offset_of(word);
    if (number != SYS_futex || offset == NOWHERE) {
        engine_fail("system call %ld outside the model", number);
    }
    engine_yield(verb == FUTEX_WAIT_BITSET ? "futex wait" : "futex wake", false);
    memory_drain(running);
    if (verb != FUTEX_WAIT_BITSET) {
        return wake(offset);
    }
    uint32_t found;
    memcpy(&found, world.memory + offset, 4);
    engine_observe(found);
    if (found != value) {
        errno = EAGAIN;
        return -1;
    }
    self()->state = P_BLOCKED;
    self()->futex = offset;
    engine_yield("(asleep)", false);
    engine_observe((uint64_t)self()->wait_result);
    errno = ETIMEDOUT;
    return self()->wait_result == 0 ? 0 : -1;
}

/* ---- locks of the kernel ---- */

static unsigned place_of(int64_t byte) {
    unsigned place = scripts_lock_place(byte);
    if (place >= LOCKS) {
        engine_fail("a lock on byte %lld", (long long)byte);
    }
    return place;
}

static void step(const char *where) {
    engine_yield(where, false);
    memory_drain(running);
}

static bool is_free(unsigned place, int process, bool exclusive) {
    uint8_t owner = world.control.exclusive[place];
    uint8_t others = (uint8_t)(world.control.shared[place] & ~(1u << process));
    return (owner == 0 || owner == process + 1) && (!exclusive || others == 0);
}

static enum lock_status observed(bool taken) {
    engine_observe(taken);
    return taken ? LOCK_TAKEN : LOCK_HELD_ELSEWHERE;
}

enum lock_status file_lock_take(int fd, int64_t byte) {
    (void)fd;
    step("file_lock_take");
    unsigned place = place_of(byte);
    bool taken = is_free(place, running, true);
    if (taken) {
        world.control.exclusive[place] = (uint8_t)(running + 1);
        world.control.shared[place] = 0;
    }
    return observed(taken);
}

enum lock_status file_lock_share(int fd, int64_t byte) {
    (void)fd;
    step("file_lock_share");
    unsigned place = place_of(byte);
    bool taken = is_free(place, running, false);
    if (taken) {
        world.control.exclusive[place] = 0;
        world.control.shared[place] |= (uint8_t)(1u << running);
    }
    return observed(taken);
}

void file_lock_drop(int fd, int64_t byte) {
    (void)fd;
    step("file_lock_drop");
    unsigned place = place_of(byte);
    if (world.control.exclusive[place] == running + 1) {
        world.control.exclusive[place] = 0;
    }
    world.control.shared[place] &= (uint8_t)~(1u << running);
}

enum lock_status file_lock_probe(int fd, int64_t byte) {
    (void)fd;
    step("file_lock_probe");
    return observed(is_free(place_of(byte), running, true));
}

enum lock_status file_lock_find(int fd, int64_t *start, int64_t *bytes) {
    (void)fd;
    step("file_lock_find");
    bool all_free = true;
    for (int64_t byte = *start; byte < *start + *bytes; byte++) {
        all_free = all_free && is_free(place_of(byte), running, true);
    }
    return observed(all_free);
}

void memory_release_locks(int process) {
    for (unsigned i = 0; i < LOCKS; i++) {
        if (world.control.exclusive[i] == process + 1) {
            world.control.exclusive[i] = 0;
        }
        world.control.shared[i] &= (uint8_t)~(1u << process);
    }
}
