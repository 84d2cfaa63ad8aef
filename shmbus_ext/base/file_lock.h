/* File locks as proof of life: the kernel drops them when the last copy of the description closes,
 * after the end of its process and of every writing thread.
 *
 * Invariant: a newly acquired lock proves the end of its last owner; a stopped process keeps its
 * locks, and a reused pid means nothing. layout.h lists the lock bytes. */
#pragma once

#include <stdint.h>

enum lock_status { LOCK_TAKEN = 0, LOCK_HELD_ELSEWHERE, LOCK_ERROR };
enum lock_status file_lock_take(int fd, int64_t byte);
void file_lock_drop(int fd, int64_t byte);
/* Tests for a lock held by a foreign description. */
enum lock_status file_lock_probe(int fd, int64_t byte);
/* A shared lock; a read-only description suffices. */
enum lock_status file_lock_share(int fd, int64_t byte);
/* Shared locks on neighbouring bytes in one system call: every byte or none. */
enum lock_status file_lock_share_range(int fd, int64_t start, int64_t bytes);
void file_lock_drop_range(int fd, int64_t start, int64_t bytes);
/* Finds the first foreign lock in [*start, *start + *bytes), with its range. */
enum lock_status file_lock_find(int fd, int64_t *start, int64_t *bytes);
/* Locks every byte at once: succeeds only if no foreign description holds a lock. */
enum lock_status file_lock_take_all(int fd);
