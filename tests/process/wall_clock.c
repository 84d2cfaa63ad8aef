/* Preloaded into the processes of a soak: a wall clock that jumps by what a file says.
 *
 * The file (SHMBUS_WALL_CLOCK) holds an int64 of nanoseconds, mapped when first asked. The other
 * clocks are the kernel's, since it compares them with deadlines. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define NS INT64_C(1000000000)

static const volatile int64_t *jump(void) {
    static const volatile int64_t *mapped;
    static const int64_t none;
    if (mapped == NULL) {
        const char *path = getenv("SHMBUS_WALL_CLOCK");
        int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        void *memory = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, fd, 0);
        mapped = memory == MAP_FAILED ? &none : memory;
        if (fd >= 0) {
            close(fd);
        }
    }
    return mapped;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    }
    int status = real(clock, at);
    if (status == 0 && clock == CLOCK_REALTIME) {
        int64_t ns = at->tv_sec * NS + at->tv_nsec + *jump();
        at->tv_sec = ns / NS;
        at->tv_nsec = ns % NS;
    }
    return status;
}
