/* Routes the ring's shared accesses through the explorer: forced into the ring's own sources
 * (-include), which stay as they ship.
 *
 * Every C11 atomic, every futex call, and every copy out of the segment becomes a call of
 * model_*: there the scheduler decides who goes on, and who dies. Plain stores need no hook: the
 * explorer finds them by comparing memory. */
#pragma once

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hooks_api.h"

#define MODEL_TEXT(x) #x
#define MODEL_TEXT_OF(x) MODEL_TEXT(x)
#define MODEL_HERE __FILE__ ":" MODEL_TEXT_OF(__LINE__)

#define MODEL_VALUE(p) __typeof__(((void)0, *(p)))

#undef atomic_load_explicit
#define atomic_load_explicit(p, order)                                                           \
    ((MODEL_VALUE(p))model_load((p), sizeof *(p), (int)(order), MODEL_HERE))
#undef atomic_store_explicit
#define atomic_store_explicit(p, value, order)                                                   \
    model_store((p), sizeof *(p), (uint64_t)(value), (int)(order), MODEL_HERE)
#undef atomic_fetch_add_explicit
#define atomic_fetch_add_explicit(p, value, order)                                               \
    __extension__({                                                                              \
        uint64_t model_before = model_rmw((p), sizeof *(p), MODEL_ADD, (uint64_t)(value),        \
                                          (int)(order), MODEL_HERE);                             \
        (MODEL_VALUE(p)) model_before;                                                           \
    })
#undef atomic_fetch_sub_explicit
#define atomic_fetch_sub_explicit(p, value, order)                                               \
    __extension__({                                                                              \
        uint64_t model_before = model_rmw((p), sizeof *(p), MODEL_SUB, (uint64_t)(value),        \
                                          (int)(order), MODEL_HERE);                             \
        (MODEL_VALUE(p)) model_before;                                                           \
    })
#undef atomic_fetch_and_explicit
#define atomic_fetch_and_explicit(p, value, order)                                               \
    __extension__({                                                                              \
        uint64_t model_before = model_rmw((p), sizeof *(p), MODEL_AND, (uint64_t)(value),        \
                                          (int)(order), MODEL_HERE);                             \
        (MODEL_VALUE(p)) model_before;                                                           \
    })
#undef atomic_exchange_explicit
#define atomic_exchange_explicit(p, value, order)                                                \
    __extension__({                                                                              \
        uint64_t model_before = model_rmw((p), sizeof *(p), MODEL_EXCHANGE, (uint64_t)(value),   \
                                          (int)(order), MODEL_HERE);                             \
        (MODEL_VALUE(p)) model_before;                                                           \
    })
#undef atomic_compare_exchange_strong_explicit
#define atomic_compare_exchange_strong_explicit(p, expected, desired, order, failure_order)      \
    __extension__({                                                                              \
        uint64_t model_expected = *(expected);                                                   \
        _Bool model_done =                                                                       \
            model_compare_exchange((p), sizeof *(p), &model_expected, (uint64_t)(desired),       \
                                   (int)(order), (int)(failure_order), MODEL_HERE);              \
        *(expected) = (__typeof__(*(expected)))model_expected;                                   \
        model_done;                                                                              \
    })
#undef atomic_thread_fence
#define atomic_thread_fence(order) model_fence((int)(order), MODEL_HERE)

#define syscall model_syscall
#define clock_gettime model_clock_gettime
#define memcpy model_memcpy
#define malloc model_malloc
#define calloc model_calloc
#define realloc model_realloc
#define free(block) ((void)(block))
