/* Visibility of stores to loads; locks, futexes and the clock.
 *
 * Two models. The strong model has a single memory, where a step's stores arrive at once: every
 * interleaving of the processes, nothing else. In the weak model each process has a view: a plain
 * load sees the memory of the last acquire, a relaxed store may overtake earlier plain stores, and
 * any store short of seq_cst may wait in a buffer while the process goes on. A release, a fence or
 * a system call empties the buffer. The weak model allows less than C11: a finding is real; absence
 * of findings is proved for the model alone.
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

#define PLAIN_HEADER_FROM 640u /* the intent's plain fields */
#define PLAIN_HEADER_TO 704u

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
    return address >= base && address < base + segment_bytes ? (uint32_t)(address - base) : NOWHERE;
}

/* Beginning of plain stores: the retry table, and the extents behind it. */
static uint32_t plain_from(void) {
    return (uint32_t)((uint8_t *)template_segment.retries - template_segment.base);
}

static uint32_t claim_at(void) {
    return plain_from() + (uint32_t)offsetof(struct retry_entry, claim);
}

/* ---- memory ---- */

static void change_word(uint32_t offset, uint64_t before, uint64_t after) {
    world.control.memory_hash ^= hash_word(offset, before) ^ hash_word(offset, after);
}

/* A store of up to 8 bytes, within a word, arrives. */
static void arrive(uint32_t offset, uint32_t size, const void *value) {
    uint32_t word = offset & ~7u;
    uint64_t before = memory_word(word, 8);
    memcpy(world.memory + offset, value, size);
    memcpy(world.shadow + offset, value, size);
    change_word(word, before, memory_word(word, 8));
    if (offset == claim_at()) {
        ghost_claim_word(before, memory_word(word, 8));
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
    if (offset >= template_segment.data_offset) {
        ghost_data_written(process, offset);
    }
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
    if (offset >= template_segment.data_offset) {
        ghost_data_written(process, offset);
    }
}

static void publish_plain_stores(int process) {
    each_change(world.view[process], world.known[process], PLAIN_HEADER_FROM, PLAIN_HEADER_TO,
                process, stored_late);
    each_change(world.view[process], world.known[process], plain_from(), segment_bytes, process,
                stored_late);
}

bool memory_has_plain_stores(int process) {
    uint32_t from = plain_from();
    return memcmp(world.view[process] + PLAIN_HEADER_FROM, world.known[process] + PLAIN_HEADER_FROM,
                  PLAIN_HEADER_TO - PLAIN_HEADER_FROM) != 0 ||
           memcmp(world.view[process] + from, world.known[process] + from,
                  segment_bytes - from) != 0;
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
    refresh_range(process, PLAIN_HEADER_FROM, PLAIN_HEADER_TO);
    refresh_range(process, plain_from(), segment_bytes);
}

/* Hash of a view, where it may differ from memory. */
uint64_t memory_hash_view(uint64_t hash, int process) {
    const uint8_t *view = world.view[process];
    hash = hash_bytes(hash, view + PLAIN_HEADER_FROM, PLAIN_HEADER_TO - PLAIN_HEADER_FROM);
    return hash_bytes(hash, view + plain_from(), segment_bytes - plain_from());
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
        flush_buffer(&world.processes[process]);
    }
}

void memory_settle(int process) {
    if (!bounds.weak) {
        each_change(world.memory, world.shadow, 0, segment_bytes, process, stored_at_once);
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
    if (!bounds.weak) {
        return;
    }
    if (p->variant == V_FLUSH_FIRST || order == memory_order_seq_cst) {
        flush_buffer(p);
    }
    if (stores && (releases(order) || p->variant != V_KEEP_PLAIN_STORES)) {
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
    const struct buffered *own = bounds.weak ? find_buffered(p, offset) : NULL;
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
    if (offset >= template_segment.data_offset) {
        ghost_data_written(running, offset);
    }
    if (bounds.weak && p->variant == V_BUFFER_STORE) {
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

static void note_freed(uint32_t offset, uint64_t before, uint64_t after) {
    uint32_t first = (uint32_t)((uint8_t *)template_segment.extents - template_segment.base);
    uint32_t extent = (offset - first) / (uint32_t)sizeof(struct extent_desc);
    if (offset >= first && extent < template_segment.extent_count &&
        (offset - first) % sizeof(struct extent_desc) == offsetof(struct extent_desc, word) &&
        link_low(before) != 0 && link_low(after) == 0) {
        ghost_extent_freed(extent, before);
    }
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
        note_freed(offset, before, desired);
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

static uint8_t *lock_place(int64_t byte) {
    return &world.control.lock_owner[byte == SHMBUS_LOCK_COLLECTOR ? MAX_SLOTS
                                     : byte == SHMBUS_LOCK_FEEDER  ? MAX_SLOTS + 1
                                                                   : byte - SHMBUS_LOCK_SLOT];
}

enum lock_status file_lock_take(int fd, int64_t byte) {
    (void)fd;
    engine_yield(OP_LOCK, NOWHERE, memory_order_seq_cst, "file_lock_take");
    before_operation(&world.processes[running], NOWHERE, memory_order_seq_cst, true);
    after_operation(memory_order_seq_cst);
    uint8_t *owner = lock_place(byte);
    bool taken = *owner == 0 || *owner == running + 1;
    if (taken) {
        *owner = (uint8_t)(running + 1);
    }
    engine_observe(taken);
    return taken ? LOCK_TAKEN : LOCK_HELD_ELSEWHERE;
}

void file_lock_drop(int fd, int64_t byte) {
    (void)fd;
    engine_yield(OP_UNLOCK, NOWHERE, memory_order_seq_cst, "file_lock_drop");
    before_operation(&world.processes[running], NOWHERE, memory_order_seq_cst, true);
    uint8_t *owner = lock_place(byte);
    if (*owner == running + 1) {
        *owner = 0;
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

static bool is_in_table(const void *at) {
    uint32_t offset = offset_of(at);
    return offset != NOWHERE && offset >= plain_from() &&
           offset < plain_from() + SHMBUS_RETRY_ENTRIES * sizeof(struct retry_entry);
}

/* Copies a retry entry by halves: either side may change it in between. */
void *model_memcpy(void *to, const void *from, size_t bytes) {
    size_t half = bytes / 16 * 8;
    bool written = is_in_table(to);
    if (!written && !is_in_table(from)) {
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
