/* Open file description locks (see file_lock.h). */
#define _GNU_SOURCE
#include "base/file_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

static struct flock lock_range(int64_t byte, int64_t bytes, short type) {
    struct flock range;
    memset(&range, 0, sizeof range);
    range.l_type = type;
    range.l_whence = SEEK_SET;
    range.l_start = byte;
    range.l_len = bytes;
    return range;
}

static enum lock_status take_lock(int fd, struct flock range) {
    if (fcntl(fd, F_OFD_SETLK, &range) == 0) {
        return LOCK_TAKEN;
    }
    return errno == EAGAIN || errno == EACCES ? LOCK_HELD_ELSEWHERE : LOCK_ERROR;
}

enum lock_status file_lock_take(int fd, int64_t byte) {
    return take_lock(fd, lock_range(byte, 1, F_WRLCK));
}

void file_lock_drop_range(int fd, int64_t start, int64_t bytes) {
    struct flock range = lock_range(start, bytes, F_UNLCK);
    (void)fcntl(fd, F_OFD_SETLK, &range);
}

void file_lock_drop(int fd, int64_t byte) {
    file_lock_drop_range(fd, byte, 1);
}

enum lock_status file_lock_probe(int fd, int64_t byte) {
    int64_t bytes = 1;
    return file_lock_find(fd, &byte, &bytes);
}

enum lock_status file_lock_share_range(int fd, int64_t start, int64_t bytes) {
    return take_lock(fd, lock_range(start, bytes, F_RDLCK));
}

enum lock_status file_lock_share(int fd, int64_t byte) {
    return file_lock_share_range(fd, byte, 1);
}

enum lock_status file_lock_find(int fd, int64_t *start, int64_t *bytes) {
    struct flock range = lock_range(*start, *bytes, F_WRLCK);
    if (fcntl(fd, F_OFD_GETLK, &range) != 0) {
        return LOCK_ERROR;
    }
    if (range.l_type == F_UNLCK) {
        return LOCK_TAKEN;
    }
    *start = range.l_start;
    *bytes = range.l_len;
    return LOCK_HELD_ELSEWHERE;
}

/* Length 0 reaches to the last possible byte of a file. */
enum lock_status file_lock_take_all(int fd) {
    return take_lock(fd, lock_range(0, 0, F_WRLCK));
}
