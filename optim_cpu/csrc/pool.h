/* pool.h - runs a function over tiles on the process's own threads. The design is in pool.c. */
#ifndef OPTIM_CPU_POOL_H
#define OPTIM_CPU_POOL_H

#include <stdint.h>

typedef void (*opt_tile_function)(void *context, uint64_t tile);

/* Calls function(context, i) once for every i < tiles, on up to opt_thread_count() threads, the caller among them, in
 * the default floating-point environment. Returns when all calls have returned. Cannot fail: without workers the
 * caller does it all. */
void opt_pool_run(opt_tile_function function, void *context, uint64_t tiles);

#endif
