/* The clock, and the start of threads, for the driver and the backends. */
#ifndef TIERING_AIO_SYSTEM_H
#define TIERING_AIO_SYSTEM_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

/* CLOCK_MONOTONIC, in nanoseconds. */
uint64_t aio_now_ns(void);

/* The same clock after timeout_ns, for a wait on a condition. */
struct timespec aio_deadline_after(int64_t timeout_ns);

/* Start a thread with all signals blocked, because SIGXFSZ (a write past RLIMIT_FSIZE) would end the process. Signals
 * of its own faults are not blocked: the process would end as well, without a handler that reports the place.
 * `name`, at most 15 characters, is shown by top and in /proc. Returns 0 or -errno. */
int aio_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument);

#endif
