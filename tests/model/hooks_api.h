/* What hooks.h turns the ring's shared accesses into; memory.c has them. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum model_rmw { MODEL_ADD, MODEL_SUB, MODEL_EXCHANGE, MODEL_AND };

uint64_t model_load(const volatile void *at, size_t size, int order, const char *where);
void model_store(volatile void *at, size_t size, uint64_t value, int order, const char *where);
uint64_t model_rmw(volatile void *at, size_t size, enum model_rmw kind, uint64_t operand, int order,
                   const char *where);
_Bool model_compare_exchange(volatile void *at, size_t size, uint64_t *expected, uint64_t desired,
                             int order, int failure_order, const char *where);
void model_fence(int order, const char *where);
long model_syscall(long number, ...);
int model_clock_gettime(clockid_t clock, struct timespec *ts);
void *model_memcpy(void *to, const void *from, size_t bytes);
void *model_malloc(size_t bytes);
void *model_calloc(size_t count, size_t bytes);
void *model_realloc(void *block, size_t bytes);
