/* Registered memory, in regions of at most 1 GiB, or less where the limit of locked memory is small: a caller adds them
 * and waits, the driver registers them, because it alone may use the backend, and finds the one that contains the bytes
 * of a block.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t MAX_REGION_SIZE = UINT64_C(1) << 30; /* io_uring's limit for one buffer */

int aio_buffers_allocate(aio_context *context)
{
    if (!context->registered || !context->backend.ops->register_buffer)
        return 0;
    context->regions = calloc(AIO_MAX_BUFFERS, sizeof context->regions[0]);
    context->ready = calloc(AIO_MAX_BUFFERS, sizeof(void *));
    return context->regions && context->ready ? 0 : -ENOMEM;
}

/* Add one region, and wait until the driver has tried it. Returns 0 or -errno. With the lock. */
static int register_region(aio_context *context, char *address, uint64_t nbytes)
{
    unsigned number = context->n_regions;
    if (context->closing)
        return -ESHUTDOWN;
    if (number == AIO_MAX_BUFFERS)
        return -ENOSPC;
    context->regions[context->n_regions++] = (struct region){.address = address, .nbytes = nbytes};
    /* The driver registers, because it alone may use the backend. It counts n_tried up and broadcasts `any`. */
    aio_wake_driver(context);
    while (context->n_tried <= number)
        pthread_cond_wait(&context->any, &context->lock);
    int error = context->regions[number].error;
    /* Free the slot of a refused region for the next try. Only the last one: other calls wait for n_tried to pass
     * theirs. */
    if (error && context->n_regions == number + 1)
        context->n_tried = --context->n_regions;
    return error;
}

int64_t aio_register_buffer(aio_context *context, void *address, uint64_t nbytes)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    if (!address || nbytes == 0 || nbytes > INT64_MAX)
        return -EINVAL;
    if (!context->regions)
        return -EOPNOTSUPP;
    uint64_t done = 0, size = MAX_REGION_SIZE;
    int error = 0;
    pthread_mutex_lock(&context->lock);
    while (done < nbytes) {
        size = size < nbytes - done ? size : nbytes - done;
        error = register_region(context, (char *)address + done, size);
        if (!error)
            done += size;
        else if (error == -ENOMEM && size / 2 >= context->block_size)
            /* RLIMIT_MEMLOCK: half of it may fit. No block fits into less than a block. */
            size = size / 2 / context->block_size * context->block_size;
        else
            break;
    }
    pthread_mutex_unlock(&context->lock);
    return error && !(error == -ENOMEM && done) ? error : (int64_t)done;
}

/* Number of registered regions that begin at `address` or before. */
static unsigned count_up_to(const aio_context *context, const char *address)
{
    unsigned low = 0, high = context->n_ready;
    while (low < high) {
        unsigned middle = low + (high - low) / 2;
        if (context->ready[middle]->address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The number of the registered buffer that contains the whole range, or -1. Of overlapping regions, only the last
 * one that begins before the range is considered; memory in the others is transferred as unregistered memory. */
int aio_buffer_find(const aio_context *context, const char *data, uint64_t nbytes)
{
    unsigned n = count_up_to(context, data);
    if (n == 0)
        return -1;
    const struct region *region = context->ready[n - 1];
    bool holds = (uint64_t)(data - region->address) + nbytes <= region->nbytes;
    return holds ? (int)(region - context->regions) : -1;
}

static void add_ready(aio_context *context, struct region *region)
{
    unsigned index = count_up_to(context, region->address);
    memmove(context->ready + index + 1, context->ready + index,
            (context->n_ready - index) * sizeof context->ready[0]);
    context->ready[index] = region;
    context->n_ready++;
}

/* Register new regions with the backend. Releases the lock during each registration, which touches every page. */
void aio_buffers_register(aio_context *context)
{
    struct aio_backend *backend = &context->backend;
    while (context->n_tried < context->n_regions) {
        /* Read with the lock and used without it: only this thread counts n_tried up, and a pending region does
         * not change. */
        unsigned number = context->n_tried;
        struct region *region = &context->regions[number];
        pthread_mutex_unlock(&context->lock);
        int error = backend->ops->register_buffer(backend, number, region->address, region->nbytes);
        pthread_mutex_lock(&context->lock);
        region->state = error ? REGION_REFUSED : REGION_READY;
        region->error = error;
        if (error) {
            context->info.buffers_error = error;
        } else {
            context->info.registered_bytes += region->nbytes;
            add_ready(context, region);
        }
        /* Under one lock with the state of the region, which its caller reads when n_tried has passed it. */
        context->n_tried++;
        pthread_cond_broadcast(&context->any);
    }
    context->info.flags |= backend->flags;
    context->info.files_error = backend->files_error;
}
