#define _GNU_SOURCE
#include "system.h"

#include <signal.h>

uint64_t aio_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct timespec aio_deadline_after(int64_t timeout_ns)
{
    uint64_t at = aio_now_ns() + (uint64_t)timeout_ns;
    return (struct timespec){.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
}

int aio_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument)
{
    static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own_faults / sizeof own_faults[0]; i++)
        sigdelset(&blocked, own_faults[i]);
    /* The new thread inherits the mask of this one. */
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int error = pthread_create(thread, NULL, run, argument);
    if (!error)
        pthread_setname_np(*thread, name);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}
