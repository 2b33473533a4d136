/* A wall clock that a test can step, for any server: no allocation, so it works with jemalloc, too, where libfaketime does not.
 *
 * The file that CLOCK_STEP names holds one signed 64-bit number in the machine's byte order: microseconds that are added to the
 * wall clock, from the next reading on. Other clocks are not affected. Valkey 8.1 and later load modules with RTLD_DEEPBIND, which
 * bypasses preloaded libraries: that flag is removed, so that server and module share one clock.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("CLOCK_STEP");
    int file = path ? open(path, O_RDWR) : -1;
    if (file < 0) return;
    void *map = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) offset = map;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (failed || !offset || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
    long long micros = *offset, nanos = now->tv_nsec + (micros % 1000000) * 1000;
    now->tv_sec += micros / 1000000;
    if (nanos >= 1000000000) nanos -= 1000000000, now->tv_sec++;
    if (nanos < 0) nanos += 1000000000, now->tv_sec--;
    now->tv_nsec = nanos;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec;
    now->tv_usec = t.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (now) *now = t.tv_sec;
    return t.tv_sec;
}

void *dlopen(const char *file, int mode) {
    void *(*next)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    return next(file, mode & ~RTLD_DEEPBIND);
}
