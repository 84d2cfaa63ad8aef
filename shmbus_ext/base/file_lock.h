/* File locks as proof of life: the kernel drops them when the last copy of the description is
 * closed, which is when its process has ended and no thread of it can write any more.
 *
 * Invariant: whoever gets a lock knows that its last owner has ended; a stopped process keeps its
 * locks, and a pid that is used again means nothing. layout.h says which byte stands for what. */
#ifndef SHMBUS_BASE_FILE_LOCK_H
#define SHMBUS_BASE_FILE_LOCK_H

#include <stdint.h>

enum lock_status { LOCK_TAKEN = 0, LOCK_HELD_ELSEWHERE, LOCK_ERROR };
enum lock_status file_lock_take(int fd, int64_t byte);
void file_lock_drop(int fd, int64_t byte);
/* Whether somebody else's description holds the lock. */
enum lock_status file_lock_probe(int fd, int64_t byte);
/* A lock that several may hold; a read-only description is enough for it. */
enum lock_status file_lock_share(int fd, int64_t byte);
/* The same for neighbours, in one system call: all of them, or none. */
enum lock_status file_lock_share_range(int fd, int64_t start, int64_t bytes);
void file_lock_drop_range(int fd, int64_t start, int64_t bytes);
/* The first lock of somebody else's found in [*start, *start + *bytes), with its range. */
enum lock_status file_lock_find(int fd, int64_t *start, int64_t *bytes);
/* Every byte at once: taken only where no description but this one holds any lock. */
enum lock_status file_lock_take_all(int fd);
enum lock_status file_lock_probe_all(int fd);

#endif
