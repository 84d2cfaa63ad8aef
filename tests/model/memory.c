/* Visibility of stores to loads; locks, futexes and the clock.
 *
 * Two models. The strong model has a single memory, where a step's stores arrive at once: every
 * interleaving of the processes, and stores late by choice. In the weak model each process has a
 * view of the subject's plain stores: a plain load sees the memory of the last acquire, and a relaxed
 * store may overtake earlier plain stores. A late store waits in a buffer while the process goes on;
 * a release, a fence or a system call empties the buffer. Either model allows less than C11: a finding
 * is real; absence of findings is proved for the model alone.
 *
 * Invariant: between steps, shadow equals memory, with memory_hash as its hash. */
#include "model.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#include "hooks_api.h"
#include "base/file_lock.h"

uint64_t mix_hash(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 32);
}

uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const uint8_t *p = data;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        hash = mix_hash(hash, word);
    }
    while (bytes-- > 0) {
        hash = mix_hash(hash, *p++);
    }
    return hash;
}

static uint64_t hash_word(uint32_t offset, uint64_t word) {
    return mix_hash(mix_hash(offset + 1, word), word >> 17);
}

uint64_t memory_word(uint32_t offset, uint32_t size) {
    uint64_t value = 0;
    memcpy(&value, world.memory + offset, size);
    return value;
}

static uint8_t *base_of(int process) {
    return bounds.weak ? world.view[process] : world.memory;
}

static uint32_t offset_of(const volatile void *at) {
    if (running < 0) {
        return NOWHERE;
    }
    uintptr_t base = (uintptr_t)base_of(running);
    uintptr_t address = (uintptr_t)at;
    return address >= base && address < base + memory_bytes ? (uint32_t)(address - base) : NOWHERE;
}

/* ---- memory ---- */

static void change_word(uint32_t offset, uint64_t before, uint64_t after) {
    world.control.memory_hash ^= hash_word(offset, before) ^ hash_word(offset, after);
}

static void note_written(int process, uint32_t offset) {
    if (subject.written != NULL) {
        subject.written(process, offset);
    }
}

/* A store of up to 8 bytes, within a word, arrives. */
static void arrive(uint32_t offset, uint32_t size, const void *value) {
    uint32_t word = offset & ~7u;
    uint64_t before = memory_word(word, 8);
    memcpy(world.memory + offset, value, size);
    memcpy(world.shadow + offset, value, size);
    change_word(word, before, memory_word(word, 8));
    if (subject.arrived != NULL) {
        subject.arrived(offset, before, memory_word(word, 8));
    }
}

/* Calls back for each word of `now` different from `then`. */
static void each_change(const uint8_t *now, const uint8_t *then, uint32_t from, uint32_t to,
                        int process, void (*found)(int process, uint32_t offset)) {
    for (uint32_t block = from; block < to; block += 64) {
        uint32_t bytes = to - block < 64 ? to - block : 64;
        if (memcmp(now + block, then + block, bytes) == 0) {
            continue;
        }
        for (uint32_t at = block; at < block + bytes; at += 8) {
            if (memcmp(now + at, then + at, 8) != 0) {
                found(process, at);
            }
        }
    }
}

static void stored_at_once(int process, uint32_t offset) {
    uint64_t before;
    memcpy(&before, world.shadow + offset, 8);
    change_word(offset, before, memory_word(offset, 8));
    memcpy(world.shadow + offset, world.memory + offset, 8);
    note_written(process, offset);
}

static void stored_late(int process, uint32_t offset) {
    uint8_t *view = world.view[process];
    uint8_t *known = world.known[process];
    for (uint32_t at = offset; at < offset + 8; at++) {
        if (view[at] != known[at]) {
            known[at] = view[at];
            arrive(at, 1, &view[at]);
        }
    }
    note_written(process, offset);
}

static void publish_plain_stores(int process) {
    for (const struct range *r = subject.plain; r < subject.plain + 2; r++) {
        each_change(world.view[process], world.known[process], r->from, r->to, process,
                    stored_late);
    }
}

bool memory_has_plain_stores(int process) {
    for (const struct range *r = subject.plain; r < subject.plain + 2; r++) {
        if (memcmp(world.view[process] + r->from, world.known[process] + r->from,
                   r->to - r->from) != 0) {
            return true;
        }
    }
    return false;
}

bool memory_store_is_plain_relaxed(const struct process *p) {
    return (p->op == OP_STORE || p->op == OP_RMW) &&
           (p->order == memory_order_relaxed || p->order == memory_order_acquire);
}

/* The view takes over memory, except for its own stores under way. */
static void refresh_range(int process, uint32_t from, uint32_t to) {
    uint8_t *view = world.view[process];
    uint8_t *known = world.known[process];
    for (uint32_t block = from; block < to; block += 64) {
        uint32_t bytes = to - block < 64 ? to - block : 64;
        if (memcmp(known + block, world.memory + block, bytes) == 0) {
            continue;
        }
        for (uint32_t at = block; at < block + bytes; at++) {
            if (view[at] == known[at]) {
                view[at] = known[at] = world.memory[at];
            }
        }
    }
}

static void refresh(int process) {
    for (const struct range *r = subject.plain; r < subject.plain + 2; r++) {
        refresh_range(process, r->from, r->to);
    }
}

/* Hash of a view, where it may differ from memory. */
uint64_t memory_hash_view(uint64_t hash, int process) {
    for (const struct range *r = subject.plain; r < subject.plain + 2; r++) {
        hash = hash_bytes(hash, world.view[process] + r->from, r->to - r->from);
    }
    return hash;
}

static void flush_buffer(struct process *p) {
    for (uint32_t i = 0; i < p->buffered_count; i++) {
        arrive(p->buffered[i].offset, p->buffered[i].size, &p->buffered[i].value);
    }
    memset(p->buffered, 0, sizeof p->buffered);
    p->buffered_count = 0;
}

void memory_flush(int process) {
    if (bounds.weak) {
        publish_plain_stores(process);
    }
    flush_buffer(&world.processes[process]);
}

void memory_settle(int process) {
    if (!bounds.weak) {
        each_change(world.memory, world.shadow, 0, memory_bytes, process, stored_at_once);
    }
}

/* ---- the hooks ---- */

static bool releases(int order) {
    return order == memory_order_release || order == memory_order_acq_rel ||
           order == memory_order_seq_cst;
}

static bool acquires(int order) {
    return order == memory_order_acquire || order == memory_order_consume ||
           order == memory_order_acq_rel || order == memory_order_seq_cst;
}

static const struct buffered *find_buffered(const struct process *p, uint32_t offset) {
    for (uint32_t i = p->buffered_count; i-- > 0;) {
        if (p->buffered[i].offset == offset) {
            return &p->buffered[i];
        }
    }
    return NULL;
}

/* Has stores arrive that must precede this operation. */
static void before_operation(struct process *p, uint32_t offset, int order, bool stores) {
    if (p->variant == V_FLUSH_FIRST || order == memory_order_seq_cst) {
        flush_buffer(p);
    }
    if (bounds.weak && stores && (releases(order) || p->variant != V_KEEP_PLAIN_STORES)) {
        publish_plain_stores(running);
    }
    bool waits = p->variant == V_BUFFER_STORE && p->op == OP_STORE;
    if (stores && !waits && (releases(order) || find_buffered(p, offset) != NULL)) {
        flush_buffer(p);
    }
}

static void after_operation(int order) {
    if (bounds.weak && acquires(order)) {
        refresh(running);
    }
}

uint64_t model_load(const volatile void *at, size_t size, int order, const char *where) {
    uint32_t offset = offset_of(at);
    uint64_t value = 0;
    if (offset == NOWHERE) {
        memcpy(&value, (const void *)at, size);
        return value;
    }
    engine_yield(OP_LOAD, offset, order, where);
    struct process *p = &world.processes[running];
    before_operation(p, offset, order, false);
    const struct buffered *own = find_buffered(p, offset);
    value = own != NULL ? own->value : memory_word(offset, (uint32_t)size);
    after_operation(order);
    engine_observe(value);
    return value;
}

void model_store(volatile void *at, size_t size, uint64_t value, int order, const char *where) {
    uint32_t offset = offset_of(at);
    if (offset == NOWHERE) {
        memcpy((void *)at, &value, size);
        return;
    }
    engine_yield(OP_STORE, offset, order, where);
    struct process *p = &world.processes[running];
    before_operation(p, offset, order, true);
    note_written(running, offset);
    if (p->variant == V_BUFFER_STORE) {
        p->buffered[p->buffered_count++] = (struct buffered){value, offset, (uint32_t)size};
    } else {
        arrive(offset, (uint32_t)size, &value);
    }
    engine_observe(offset);
}

uint64_t model_rmw(volatile void *at, size_t size, enum model_rmw kind, uint64_t operand, int order,
                   const char *where) {
    uint32_t offset = offset_of(at);
    if (offset == NOWHERE) {
        engine_fail("%s: a private read-modify-write", where);
    }
    engine_yield(OP_RMW, offset, order, where);
    before_operation(&world.processes[running], offset, order, true);
    uint64_t before = memory_word(offset, (uint32_t)size);
    uint64_t after = kind == MODEL_ADD   ? before + operand
                     : kind == MODEL_SUB ? before - operand
                     : kind == MODEL_AND ? before & operand
                                         : operand;
    arrive(offset, (uint32_t)size, &after);
    after_operation(order);
    engine_observe(before);
    return before;
}

_Bool model_compare_exchange(volatile void *at, size_t size, uint64_t *expected, uint64_t desired,
                             int order, int failure_order, const char *where) {
    uint32_t offset = offset_of(at);
    if (offset == NOWHERE) {
        engine_fail("%s: a private compare-and-swap", where);
    }
    engine_yield(OP_RMW, offset, order, where);
    before_operation(&world.processes[running], offset, order, true);
    uint64_t before = memory_word(offset, (uint32_t)size);
    bool done = before == *expected;
    if (done) {
        arrive(offset, (uint32_t)size, &desired);
    }
    *expected = before;
    after_operation(done ? order : failure_order);
    engine_observe(before);
    return done;
}

void model_fence(int order, const char *where) {
    engine_yield(OP_FENCE, NOWHERE, order, where);
    before_operation(&world.processes[running], NOWHERE, order, true);
    after_operation(order);
    engine_observe((uint64_t)order); /* separates the state from the state before the fence */
}

/* ---- the kernel's part: a full barrier throughout ---- */

static long wake(uint32_t offset, int count, uint32_t kinds) {
    long woken = 0;
    for (int i = 0; i < AUDITOR && woken < count; i++) {
        struct process *p = &world.processes[i];
        if (p->state == P_BLOCKED && p->futex == offset &&
            (p->kinds & kinds) != 0) {
            p->state = P_READY;
            p->wait_result = 0;
            woken++;
        }
    }
    return woken;
}

static long sleep_on(uint32_t offset, uint32_t expected, bool timed, uint32_t kinds) {
    if ((uint32_t)memory_word(offset, 4) != expected) {
        errno = EAGAIN;
        return -1;
    }
    struct process *p = &world.processes[running];
    p->state = P_BLOCKED;
    p->futex = offset;
    p->kinds = kinds;
    p->timed = timed;
    engine_yield(OP_WAIT, offset, memory_order_seq_cst, "(asleep)");
    p = &world.processes[running];
    if (p->wait_result == 1) {
        errno = ETIMEDOUT;
        return -1;
    }
    return 0;
}

long model_syscall(long number, ...) {
    va_list arguments;
    va_start(arguments, number);
    _Atomic uint32_t *word = va_arg(arguments, _Atomic uint32_t *);
    int verb = va_arg(arguments, int);
    uint32_t value = va_arg(arguments, uint32_t);
    const struct timespec *limit = va_arg(arguments, const struct timespec *);
    (void)va_arg(arguments, uint32_t *);
    uint32_t kinds = va_arg(arguments, uint32_t);
    va_end(arguments);
    uint32_t offset = offset_of(word);
    if (number != SYS_futex || offset == NOWHERE) {
        engine_fail("system call %ld outside the model", number);
    }
    bool waits = verb == FUTEX_WAIT_BITSET;
    engine_yield(waits ? OP_WAIT : OP_WAKE, offset, memory_order_seq_cst, "futex");
    before_operation(&world.processes[running], offset, memory_order_seq_cst, true);
    after_operation(memory_order_seq_cst);
    long result = waits ? sleep_on(offset, value, limit != NULL, kinds)
                        : wake(offset, (int)value, kinds);
    engine_observe((uint64_t)result);
    return result;
}

int model_clock_gettime(clockid_t clock, struct timespec *ts) {
    (void)clock;
    ts->tv_sec = (time_t)(world.control.clock_ns / 1000000000u);
    ts->tv_nsec = (long)(world.control.clock_ns % 1000000000u);
    return 0;
}

static unsigned place_of(int64_t byte) {
    unsigned place = subject.lock_place(byte);
    if (place >= LOCKS) {
        engine_fail("a lock on byte %lld", (long long)byte);
    }
    return place;
}

static void lock_step(enum operation op, const char *where) {
    engine_yield(op, NOWHERE, memory_order_seq_cst, where);
    before_operation(&world.processes[running], NOWHERE, memory_order_seq_cst, true);
    after_operation(memory_order_seq_cst);
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
    lock_step(OP_LOCK, "file_lock_take");
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
    lock_step(OP_LOCK, "file_lock_share");
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
    lock_step(OP_UNLOCK, "file_lock_drop");
    unsigned place = place_of(byte);
    if (world.control.exclusive[place] == running + 1) {
        world.control.exclusive[place] = 0;
    }
    world.control.shared[place] &= (uint8_t)~(1u << running);
}

enum lock_status file_lock_probe(int fd, int64_t byte) {
    (void)fd;
    lock_step(OP_LOCK, "file_lock_probe");
    return observed(is_free(place_of(byte), running, true));
}

enum lock_status file_lock_find(int fd, int64_t *start, int64_t *bytes) {
    (void)fd;
    lock_step(OP_LOCK, "file_lock_find");
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

/* ---- a process's private state ---- */

void *memory_heap(int process, size_t bytes) {
    struct process *p = &world.processes[process];
    uint32_t at = p->heap_used;
    p->heap_used += (uint32_t)((bytes + 63) / 64 * 64);
    if (p->heap_used > HEAP_BYTES) {
        engine_fail("P%d needs more than %d bytes of heap", process, HEAP_BYTES);
    }
    memset(world.heap[process] + at, 0, p->heap_used - at);
    return world.heap[process] + at;
}

void *model_malloc(size_t bytes) {
    return memory_heap(running, bytes);
}

void *model_calloc(size_t count, size_t bytes) {
    return memory_heap(running, count * bytes);
}

void *model_realloc(void *block, size_t bytes) {
    uint8_t *end = world.heap[running] + HEAP_BYTES;
    uint8_t *grown = memory_heap(running, bytes);
    if (block != NULL) {
        size_t room = (size_t)(end - (uint8_t *)block);
        memmove(grown, block, bytes < room ? bytes : room);
    }
    return grown;
}

static void copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    if (offset_of(from) != NOWHERE) {
        struct process *p = &world.processes[running];
        p->history = hash_bytes(p->history, to, bytes);
    }
}

static void stop_in_copy(uint32_t offset) {
    engine_yield(OP_COPY, offset, memory_order_relaxed, "(a row)");
    if (world.processes[running].variant == V_PLAIN_STORES_FIRST) {
        publish_plain_stores(running);
    }
    engine_observe(offset);
}

static bool is_two_copies(uint32_t offset) {
    return offset != NOWHERE && (subject.is_one_copy == NULL || !subject.is_one_copy(offset));
}

/* Copies shared memory by halves: either side may change it in between. */
void *model_memcpy(void *to, const void *from, size_t bytes) {
    size_t half = bytes / 16 * 8;
    bool written = is_two_copies(offset_of(to));
    if (!written && !is_two_copies(offset_of(from))) {
        copy(to, from, bytes);
        return to;
    }
    copy(to, from, half);
    stop_in_copy(offset_of(written ? to : from));
    copy((uint8_t *)to + half, (const uint8_t *)from + half, bytes - half);
    if (written) {
        stop_in_copy(offset_of(to) + (uint32_t)half);
    }
    return to;
}
