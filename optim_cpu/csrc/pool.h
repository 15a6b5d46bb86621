/* pool.h - runs a function over ranges on a pool of threads. The design is in pool.c. */
#ifndef OPTIM_CPU_POOL_H
#define OPTIM_CPU_POOL_H

#include <stdint.h>

typedef void (*opt_range_function)(void *context, uint64_t begin, uint64_t end);

/* Call function(context, begin, end) for ranges that cover 0 to count once, on up to opt_thread_count() threads including
 * the caller, in the default floating-point environment. Ranges have `most` elements at most; with more than one thread,
 * they begin at multiples of `unit`, which divides `most`. Returns when all calls have returned: context is borrowed
 * until then. Cannot fail: without workers, the caller does it all. Any thread may call it, also concurrently. */
void opt_pool_run(opt_range_function function, void *context, uint64_t count, uint64_t unit, uint64_t most);

#endif
