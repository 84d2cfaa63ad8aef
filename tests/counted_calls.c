/* Preloaded into a child of a test: counts the file locks that a process asks the kernel for, and
 * the waiters that its rings of bells wake. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/syscall.h>

_Atomic long counted_locks, counted_woken;

static int forward(const char *name, int fd, int command, void *argument) {
    int (*real)(int, int, void *);
    *(void **)&real = dlsym(RTLD_NEXT, name);
    counted_locks += command == F_OFD_SETLK || command == F_OFD_GETLK;
    return real(fd, command, argument);
}

#define COUNTED(name)                                    \
    int name(int fd, int command, ...) {                 \
        va_list rest;                                    \
        va_start(rest, command);                         \
        void *argument = va_arg(rest, void *);           \
        va_end(rest);                                    \
        return forward(#name, fd, command, argument);    \
    }

COUNTED(fcntl)
COUNTED(fcntl64)

long syscall(long number, ...) {
    long (*real)(long, ...), each[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) {
        each[i] = va_arg(rest, long);
    }
    va_end(rest);
    *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    long result = real(number, each[0], each[1], each[2], each[3], each[4], each[5]);
    int verb = (int)each[1] & FUTEX_CMD_MASK;
    if (number == SYS_futex && (verb == FUTEX_WAKE || verb == FUTEX_WAKE_BITSET) && result > 0) {
        counted_woken += result;
    }
    return result;
}
