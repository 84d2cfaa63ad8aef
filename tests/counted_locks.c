/* Preloaded into a child of a test: counts the file locks that a process asks the kernel for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>

_Atomic long counted_locks;

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
