/* The clock and the threads that the driver and the backends share. */
#ifndef TIERING_AIO_SYSTEM_H
#define TIERING_AIO_SYSTEM_H

#include <pthread.h>
#include <stdint.h>

/* CLOCK_MONOTONIC, in nanoseconds. */
uint64_t aio_now_ns(void);

/* Start a thread that receives no signal: SIGXFSZ (a write past RLIMIT_FSIZE) would otherwise end the process. The
 * thread does receive its own faults: blocked, they would end the process as well, and no handler would say where.
 * Returns 0 or -errno. */
int aio_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
