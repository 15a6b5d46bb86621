/* pool.h - runs a function over tiles on a pool of threads. The design is in pool.c. */
#ifndef OPTIM_CPU_POOL_H
#define OPTIM_CPU_POOL_H

#include <stdint.h>

typedef void (*opt_tile_function)(void *context, uint64_t tile);

/* Call function(context, i) once for every i < tiles, on up to opt_thread_count() threads including the caller, in the
 * default floating-point environment. Returns when all calls have returned: context is borrowed until then. Cannot
 * fail: without workers, the caller runs all tiles. Any thread may call it, also concurrently. */
void opt_pool_run(opt_tile_function function, void *context, uint64_t tiles);

#endif
