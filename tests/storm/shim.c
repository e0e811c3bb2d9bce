/* Stands between a process and libc where a run meets its disk: counts its calls, fails one, keeps a journal of all.

   Loaded by LD_PRELOAD; does nothing until storm_arm is called. From then on each call on a path below the folders that
   were given has a number, and a record in the journal, in the order in which the calls take effect: one thread at a
   time, but for locks, which may wait. Call number `fail_at` (or each writing call from it on) fails with the error that
   was given for its kind; a write whose error is 0 writes half. A call that libc makes inside itself is not seen, such
   as the write of fflush. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#undef fcntl
#undef open
#undef openat

/* In the order of `shim.KINDS`. */
enum { OPEN, READ_OPEN, CREATE, WRITE, TRUNCATE, SYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, CLOSE, MAP, LOCK, KINDS };

struct record {
    uint32_t kind, error;      /* error: 0, or that of the call */
    uint64_t number;           /* of the call, from 1 */
    uint64_t inode;            /* of the file or directory it is about; 0: none */
    uint64_t offset;           /* of written data; of TRUNCATE the size */
    uint32_t path, other;      /* bytes of the paths behind the record */
    uint64_t data;             /* bytes behind the paths */
};

static struct {
    int armed, sticky, keeps_data, journal;
    long fail_at;
    int errors[KINDS];
    char folders[16][4096];
    int count;
} shim;
static long *calls; /* shared with forked processes */
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static __thread int inside; /* a wrapper calls another one */

static void lock_all(void) { pthread_mutex_lock(&one_at_a_time); }
static void unlock_all(void) { pthread_mutex_unlock(&one_at_a_time); }

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* folders: absolute, one a line. errors: one of each kind. Returns 0, or -1 with errno. */
int storm_arm(const char *folders, const char *journal, int keeps_data, long fail_at, int sticky, const int *errors) {
    shim.count = 0;
    for (const char *at = folders; *at && shim.count < 16;) {
        size_t length = strcspn(at, "\n");
        if (length >= sizeof shim.folders[0]) return errno = ENAMETOOLONG, -1;
        memcpy(shim.folders[shim.count], at, length);
        shim.folders[shim.count++][length] = 0;
        at += length + (at[length] == '\n');
    }
    shim.journal = syscall(SYS_openat, AT_FDCWD, journal, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (shim.journal < 0) return -1;
    calls = mmap(NULL, sizeof *calls, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (calls == MAP_FAILED) return -1;
    memcpy(shim.errors, errors, sizeof shim.errors);
    shim.keeps_data = keeps_data, shim.fail_at = fail_at, shim.sticky = sticky;
    pthread_atfork(lock_all, unlock_all, unlock_all);
    shim.armed = 1;
    return 0;
}

/* ---- paths */

static int is_below(const char *path) {
    for (int i = 0; i < shim.count; i++) {
        size_t length = strlen(shim.folders[i]);
        if (!strncmp(path, shim.folders[i], length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

/* The path of a descriptor; a file that was removed keeps its former one. Returns whether it is watched. */
static int path_of(int fd, char *path) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, 4095);
    if (length < 0) return 0;
    path[length] = 0;
    char *end = strstr(path, " (deleted)");
    if (end && !end[10]) *end = 0;
    return is_below(path);
}

/* An absolute path without `.`, `..` and empty parts. Returns whether it is watched. */
static int absolute(int folder, const char *name, char *path) {
    char whole[8192] = "";
    if (name[0] != '/') {
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, whole, 4096) < 0) return 0;
        } else {
            path_of(folder, whole);
        }
    }
    size_t length = strlen(whole);
    if (length + strlen(name) + 2 > sizeof whole) return 0;
    whole[length] = '/';
    strcpy(whole + length + 1, name);
    size_t end = 0;
    char *rest = NULL;
    path[0] = 0;
    for (char *part = strtok_r(whole, "/", &rest); part; part = strtok_r(NULL, "/", &rest)) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) {
            while (end && path[--end] != '/') continue;
            path[end] = 0;
            continue;
        }
        size_t size = strlen(part);
        if (end + size + 2 > 4095) return 0;
        path[end++] = '/';
        memcpy(path + end, part, size + 1);
        end += size;
    }
    return is_below(path);
}

static uint64_t inode_at(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

/* ---- numbers and records */

static int is_writing(int kind) { return kind != READ_OPEN && kind != CLOSE && kind != MAP && kind != LOCK; }

/* Gives the call its number. Returns -1 where it is to go on, 0 where it is to be short, else the error. */
static int next(int kind, long *number) {
    *number = __atomic_add_fetch(calls, 1, __ATOMIC_SEQ_CST);
    int fails = *number == shim.fail_at || (shim.sticky && *number > shim.fail_at && shim.fail_at && is_writing(kind));
    return fails ? shim.errors[kind] : -1;
}

static void note(int kind, long number, int error, uint64_t inode, uint64_t offset, const char *path, const char *other,
                 const struct iovec *data, int parts, uint64_t size) {
    struct record record = {kind, error, number, inode, offset, strlen(path), other ? strlen(other) : 0, 0};
    struct iovec all[3 + 64] = {{&record, sizeof record}, {(void *)path, record.path}, {(void *)other, record.other}};
    int used = 3;
    if (shim.keeps_data && data && !error) {
        for (int i = 0; i < parts && used < 67 && record.data < size; i++) {
            uint64_t length = data[i].iov_len;
            if (record.data + length > size) length = size - record.data;
            all[used++] = (struct iovec){data[i].iov_base, length};
            record.data += length;
        }
    }
    syscall(SYS_writev, shim.journal, all, used);
}

#define WATCHED(test) (shim.armed && !inside && (test))
#define BEGIN int saved = errno; (void)saved; lock_all(); inside = 1
#define END(result) do { int kept = errno; inside = 0; unlock_all(); errno = kept; return result; } while (0)

/* A call on a path without data: `failed` is what it returns for an error. */
#define SIMPLE(kind, call, failed, inode, offset, path, other) do { \
    BEGIN; \
    long number; \
    int error = next(kind, &number); \
    uint64_t about = inode; \
    __typeof__(call) result = failed; \
    if (error > 0) errno = error; else result = call; \
    note(kind, number, result == failed ? errno : 0, about, offset, path, other, NULL, 0, 0); \
    END(result); \
} while (0)

/* ---- open */

static int opened(int folder, const char *name, int flags, mode_t mode, const char *path) {
    BEGIN;
    uint64_t before = inode_at(path);
    int kind = !before && (flags & O_CREAT) ? CREATE : (flags & (O_WRONLY | O_RDWR)) ? OPEN : READ_OPEN;
    long number;
    int error = next(kind, &number), fd = -1;
    if (error > 0) errno = error; else fd = syscall(SYS_openat, folder, name, flags | O_LARGEFILE, mode);
    int met = fd < 0 ? errno : 0;
    uint64_t inode = fd < 0 ? before : inode_of(fd);
    note(kind, number, met, inode, 0, path, NULL, NULL, 0, 0);
    if (fd >= 0 && before && (flags & O_TRUNC)) note(TRUNCATE, number, 0, inode, 0, path, NULL, NULL, 0, 0);
    errno = met ? met : saved;
    END(fd);
}

#define MODE(flags) mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

#define OPEN_AT(folder, name, flags, mode) do { \
    char path[4096]; \
    if (WATCHED(absolute(folder, name, path))) return opened(folder, name, flags, mode, path); \
    return syscall(SYS_openat, folder, name, flags | O_LARGEFILE, mode); \
} while (0)

int open(const char *name, int flags, ...) { MODE(flags) OPEN_AT(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) OPEN_AT(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) OPEN_AT(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) OPEN_AT(folder, name, flags, mode); }
int __open_2(const char *name, int flags) { OPEN_AT(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { OPEN_AT(AT_FDCWD, name, flags, 0); }
int __openat_2(int folder, const char *name, int flags) { OPEN_AT(folder, name, flags, 0); }
int __openat64_2(int folder, const char *name, int flags) { OPEN_AT(folder, name, flags, 0); }
int creat(const char *name, mode_t mode) { OPEN_AT(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { OPEN_AT(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static FILE *stream(const char *name, const char *how, FILE *(*real)(const char *, const char *)) {
    char path[4096];
    if (!WATCHED(absolute(AT_FDCWD, name, path))) return real(name, how);
    int kind = strchr(how, 'r') && !strchr(how, '+') ? READ_OPEN : inode_at(path) ? OPEN : CREATE;
    BEGIN;
    long number;
    int error = next(kind, &number);
    FILE *file = NULL;
    if (error > 0) errno = error; else file = real(name, how);
    int met = file ? 0 : errno;
    note(kind, number, met, file ? inode_of(fileno(file)) : 0, 0, path, NULL, NULL, 0, 0);
    errno = met ? met : saved;
    END(file);
}

FILE *fopen(const char *name, const char *how) { REAL(fopen); return stream(name, how, real); }
FILE *fopen64(const char *name, const char *how) { REAL(fopen64); return stream(name, how, real); }

int close(int fd) {
    char path[4096];
    if (!WATCHED(path_of(fd, path))) return syscall(SYS_close, fd);
    BEGIN;
    long number;
    int error = next(CLOSE, &number);
    uint64_t inode = inode_of(fd);
    int result = syscall(SYS_close, fd);
    if (error > 0) result = -1, errno = error; /* the descriptor is gone in any case, as on Linux */
    note(CLOSE, number, result ? errno : 0, inode, 0, path, NULL, NULL, 0, 0);
    END(result);
}

/* ---- write */

static uint64_t position(int fd, off_t offset) {
    struct stat found;
    if (offset >= 0) return offset;
    if (syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND) return fstat(fd, &found) ? 0 : found.st_size;
    return lseek(fd, 0, SEEK_CUR);
}

static ssize_t written(int fd, const struct iovec *data, int parts, off_t offset, const char *path) {
    BEGIN;
    long number;
    int error = next(WRITE, &number);
    uint64_t inode = inode_of(fd), at = position(fd, offset), size = 0;
    for (int i = 0; i < parts; i++) size += data[i].iov_len;
    ssize_t result = -1;
    struct iovec half = parts ? data[0] : (struct iovec){NULL, 0};
    if (error == 0 && size > 1) { /* half of the first part, or all of that where there are more */
        if (half.iov_len > 1) half.iov_len /= 2;
        data = &half, parts = 1;
    }
    if (error > 0) errno = error;
    else if (offset < 0) result = syscall(SYS_writev, fd, data, parts);
    else result = syscall(SYS_pwritev, fd, data, parts, offset, 0);
    note(WRITE, number, result < 0 ? errno : 0, inode, at, path, NULL, data, parts, result < 0 ? 0 : result);
    END(result);
}

#define PUT(fd, data, parts, offset, call) do { \
    char path[4096]; \
    if (WATCHED(path_of(fd, path))) return written(fd, data, parts, offset, path); \
    return call; \
} while (0)

#define ONE(data, size) (&(struct iovec){(void *)data, size})

ssize_t write(int fd, const void *data, size_t size) { PUT(fd, ONE(data, size), 1, -1, syscall(SYS_write, fd, data, size)); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    PUT(fd, ONE(data, size), 1, at, syscall(SYS_pwrite64, fd, data, size, at));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    PUT(fd, ONE(data, size), 1, at, syscall(SYS_pwrite64, fd, data, size, at));
}
ssize_t writev(int fd, const struct iovec *data, int parts) { PUT(fd, data, parts, -1, syscall(SYS_writev, fd, data, parts)); }
ssize_t pwritev(int fd, const struct iovec *data, int parts, off_t at) {
    PUT(fd, data, parts, at, syscall(SYS_pwritev, fd, data, parts, at, 0));
}
ssize_t pwritev64(int fd, const struct iovec *data, int parts, off64_t at) {
    PUT(fd, data, parts, at, syscall(SYS_pwritev, fd, data, parts, at, 0));
}

/* What the kernel has copied into a file is read back for the journal. */
static ssize_t copied(int to, int from, off_t *in, off_t *out, size_t size, const char *path, int sends) {
    BEGIN;
    long number;
    int error = next(WRITE, &number);
    uint64_t inode = inode_of(to), at = position(to, out ? *out : -1);
    ssize_t result = -1;
    if (error == 0 && size > 1) size /= 2;
    if (error > 0) errno = error;
    else if (sends) result = syscall(SYS_sendfile, to, from, in, size);
    else result = syscall(SYS_copy_file_range, from, in, to, out, size, 0);
    int met = result < 0 ? errno : 0;
    char *data = shim.keeps_data && result > 0 ? malloc(result) : NULL;
    if (data) {
        char link[40];
        snprintf(link, sizeof link, "/proc/self/fd/%d", to);
        int again = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
        if (again < 0 || syscall(SYS_pread64, again, data, result, at) != result) abort();
        syscall(SYS_close, again);
    }
    note(WRITE, number, met, inode, at, path, NULL, ONE(data, result), data != NULL, result < 0 ? 0 : result);
    free(data);
    errno = met ? met : saved;
    END(result);
}

ssize_t copy_file_range(int from, off64_t *in, int to, off64_t *out, size_t size, unsigned flags) {
    char path[4096];
    if (WATCHED(path_of(to, path))) return copied(to, from, in, out, size, path, 0);
    return syscall(SYS_copy_file_range, from, in, to, out, size, flags);
}
ssize_t sendfile(int to, int from, off_t *in, size_t size) {
    char path[4096];
    if (WATCHED(path_of(to, path))) return copied(to, from, in, NULL, size, path, 1);
    return syscall(SYS_sendfile, to, from, in, size);
}
ssize_t sendfile64(int to, int from, off64_t *in, size_t size) {
    char path[4096];
    if (WATCHED(path_of(to, path))) return copied(to, from, in, NULL, size, path, 1);
    return syscall(SYS_sendfile, to, from, in, size);
}

int ftruncate(int fd, off_t size) {
    char path[4096];
    if (!WATCHED(path_of(fd, path))) return syscall(SYS_ftruncate, fd, size);
    SIMPLE(TRUNCATE, (int)syscall(SYS_ftruncate, fd, size), -1, inode_of(fd), size, path, NULL);
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int truncate(const char *name, off_t size) {
    char path[4096];
    if (!WATCHED(absolute(AT_FDCWD, name, path))) return syscall(SYS_truncate, name, size);
    SIMPLE(TRUNCATE, (int)syscall(SYS_truncate, name, size), -1, inode_at(path), size, path, NULL);
}
int truncate64(const char *name, off64_t size) { return truncate(name, size); }

/* Room for a file: fails as a write does, and changes at most its size. */
static int allocated(int fd, int mode, off_t at, off_t size, const char *path) {
    BEGIN;
    long number;
    int error = next(WRITE, &number), result = -1;
    struct stat found;
    if (error > 0) errno = error; else result = syscall(SYS_fallocate, fd, mode, at, size);
    int met = result ? errno : 0;
    if (fstat(fd, &found)) found.st_size = 0;
    note(TRUNCATE, number, met, inode_of(fd), found.st_size, path, NULL, NULL, 0, 0);
    errno = met ? met : saved;
    END(result);
}
int fallocate(int fd, int mode, off_t at, off_t size) {
    char path[4096];
    if (WATCHED(path_of(fd, path))) return allocated(fd, mode, at, size, path);
    return syscall(SYS_fallocate, fd, mode, at, size);
}
int fallocate64(int fd, int mode, off64_t at, off64_t size) { return fallocate(fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) {
    char path[4096];
    REAL(posix_fallocate);
    if (!WATCHED(path_of(fd, path))) return real(fd, at, size);
    int kept = errno, result = allocated(fd, 0, at, size, path) ? errno : 0;
    errno = kept;
    return result;
}
int posix_fallocate64(int fd, off64_t at, off64_t size) { return posix_fallocate(fd, at, size); }

int fsync(int fd) {
    char path[4096];
    if (!WATCHED(path_of(fd, path))) return syscall(SYS_fsync, fd);
    SIMPLE(SYNC, (int)syscall(SYS_fsync, fd), -1, inode_of(fd), 0, path, NULL);
}
int fdatasync(int fd) {
    char path[4096];
    if (!WATCHED(path_of(fd, path))) return syscall(SYS_fdatasync, fd);
    SIMPLE(SYNC, (int)syscall(SYS_fdatasync, fd), -1, inode_of(fd), 0, path, NULL);
}

/* ---- names */

int renameat2(int of, const char *from, int at, const char *to, unsigned flags) {
    char path[4096], other[4096];
    int before = shim.armed && absolute(of, from, path), after = shim.armed && absolute(at, to, other);
    if (!WATCHED(before || after)) return syscall(SYS_renameat2, of, from, at, to, flags);
    SIMPLE(RENAME, (int)syscall(SYS_renameat2, of, from, at, to, flags), -1, inode_at(path), flags, path, other);
}
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int of, const char *from, int at, const char *to) { return renameat2(of, from, at, to, 0); }

int linkat(int of, const char *from, int at, const char *to, int flags) {
    char path[4096], other[4096];
    int before = shim.armed && absolute(of, from, path), after = shim.armed && absolute(at, to, other);
    if (!WATCHED(before || after)) return syscall(SYS_linkat, of, from, at, to, flags);
    SIMPLE(LINK, (int)syscall(SYS_linkat, of, from, at, to, flags), -1, inode_at(path), 0, path, other);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int folder, const char *name, int flags) {
    char path[4096];
    if (!WATCHED(absolute(folder, name, path))) return syscall(SYS_unlinkat, folder, name, flags);
    int kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    SIMPLE(kind, (int)syscall(SYS_unlinkat, folder, name, flags), -1, inode_at(path), 0, path, NULL);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[4096];
    if (!WATCHED(absolute(folder, name, path))) return syscall(SYS_mkdirat, folder, name, mode);
    BEGIN;
    long number;
    int error = next(MKDIR, &number), result = -1;
    if (error > 0) errno = error; else result = syscall(SYS_mkdirat, folder, name, mode);
    int met = result ? errno : 0;
    note(MKDIR, number, met, result ? 0 : inode_at(path), 0, path, NULL, NULL, 0, 0);
    errno = met ? met : saved;
    END(result);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

/* ---- maps and locks */

void *mmap(void *at, size_t size, int rights, int flags, int fd, off_t offset) {
    char path[4096];
    if ((flags & MAP_ANONYMOUS) || !WATCHED(path_of(fd, path)))
        return (void *)syscall(SYS_mmap, at, size, rights, flags, fd, offset);
    /* offset of the record: 1 where what is written into the memory reaches the file, which no journal sees */
    int shared = (flags & MAP_SHARED) && (rights & PROT_WRITE);
    SIMPLE(MAP, (void *)syscall(SYS_mmap, at, size, rights, flags, fd, offset), MAP_FAILED, inode_of(fd), shared, path, NULL);
}
void *mmap64(void *at, size_t size, int rights, int flags, int fd, off64_t offset) {
    return mmap(at, size, rights, flags, fd, offset);
}

static int locked(int fd, int how, void *rest, int is_flock, const char *path) {
    long number;
    int error = next(LOCK, &number), result = -1;
    if (error > 0) errno = error;
    else result = is_flock ? syscall(SYS_flock, fd, how) : syscall(SYS_fcntl, fd, how, rest);
    int met = result < 0 ? errno : 0;
    lock_all();
    note(LOCK, number, met, inode_of(fd), 0, path, NULL, NULL, 0, 0);
    unlock_all();
    errno = met;
    return result;
}
int flock(int fd, int how) {
    char path[4096];
    if (WATCHED(path_of(fd, path))) return locked(fd, how, NULL, 1, path);
    return syscall(SYS_flock, fd, how);
}

#define IS_LOCK(how) (how == F_SETLK || how == F_SETLKW || how == F_OFD_SETLK || how == F_OFD_SETLKW)

int fcntl(int fd, int how, ...) {
    va_list list;
    va_start(list, how);
    void *rest = va_arg(list, void *);
    va_end(list);
    char path[4096];
    if (IS_LOCK(how) && WATCHED(path_of(fd, path))) return locked(fd, how, rest, 0, path);
    return syscall(SYS_fcntl, fd, how, rest);
}
int fcntl64(int fd, int how, ...) {
    va_list list;
    va_start(list, how);
    void *rest = va_arg(list, void *);
    va_end(list);
    return fcntl(fd, how, rest);
}
