// Preloaded into a server. While the file `hangs` is in the folder BAD_DISK, syncs block; while `broken` is there, they fail; while
// `no-fork` is there, forks fail for lack of memory. The file `waiting` appears when a sync blocks.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *in_folder(char *path, const char *name) {
    const char *folder = getenv("BAD_DISK");
    snprintf(path, PATH_MAX, "%s/%s", folder ? folder : "/nonexistent", name);
    return path;
}

static int there(const char *name) {
    char path[PATH_MAX];
    return access(in_folder(path, name), F_OK) == 0;
}

static int once_the_disk_answers(long call, int file) {
    char path[PATH_MAX];
    while (there("hangs")) {
        int mark = open(in_folder(path, "waiting"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        if (mark >= 0) close(mark);
        usleep(1000);
    }
    if (there("broken")) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(call, file);
}

int fsync(int file) { return once_the_disk_answers(SYS_fsync, file); }
int fdatasync(int file) { return once_the_disk_answers(SYS_fdatasync, file); }

pid_t fork(void) {
    if (there("no-fork")) {
        errno = ENOMEM;
        return -1;
    }
    return ((pid_t(*)(void))dlsym(RTLD_NEXT, "fork"))();
}
