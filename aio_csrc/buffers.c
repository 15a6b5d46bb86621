/* Registered memory, in regions of at most 1 GiB: a caller adds them and waits, the driver registers them, because it
 * alone may use the backend, and finds the one that contains the bytes of a block.
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

int aio_register_buffer(aio_context *context, void *address, uint64_t nbytes)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    if (!address || nbytes == 0)
        return -EINVAL;
    if (!context->regions)
        return -EOPNOTSUPP;
    uint64_t n = nbytes / MAX_REGION_SIZE + (nbytes % MAX_REGION_SIZE != 0);
    int error = 0;
    pthread_mutex_lock(&context->lock);
    unsigned first = context->n_regions;
    if (context->closing) {
        error = -ESHUTDOWN;
    } else if (n > AIO_MAX_BUFFERS - first) {
        error = -ENOSPC;
    } else {
        for (uint64_t at = 0; at < nbytes; at += MAX_REGION_SIZE)
            context->regions[context->n_regions++] =
                (struct region){.address = (char *)address + at,
                                .nbytes = nbytes - at < MAX_REGION_SIZE ? nbytes - at : MAX_REGION_SIZE};
        /* The driver registers, because it alone may use the backend. It counts n_tried up and broadcasts `any`. */
        aio_wake_driver(context);
        while (context->n_tried < first + n)
            pthread_cond_wait(&context->any, &context->lock);
        for (uint64_t i = first; i < first + n; i++)
            error = error ? error : context->regions[i].error;
        /* Free the slots of refused regions, so that another try can use them. Only the last slots, and only those
         * of this call: other calls wait for n_tried to pass theirs. */
        if (context->n_regions == first + n)
            while (context->n_regions > first &&
                   context->regions[context->n_regions - 1].state == REGION_REFUSED)
                context->n_tried = --context->n_regions;
    }
    pthread_mutex_unlock(&context->lock);
    return error;
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
