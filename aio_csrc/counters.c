/* What a context counts for each file: the driver counts blocks when they have ended, the entry points read the counters.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <string.h>

#include "system.h"

static void count_latency(struct latencies *latencies, uint64_t ns)
{
    unsigned octave = 63u - (unsigned)__builtin_clzll(ns | 1);
    unsigned shift = octave > AIO_FINE_BITS ? octave - AIO_FINE_BITS : 0; /* bits below a bucket's width */
    uint64_t bucket = ((uint64_t)shift << AIO_FINE_BITS) + (ns >> shift);
    latencies->counts[bucket < AIO_FINE_BUCKETS ? bucket : AIO_FINE_BUCKETS - 1]++;
    latencies->max_ns = ns > latencies->max_ns ? ns : latencies->max_ns;
}

static void count_error(aio_direction_stats *stats, int error)
{
    aio_error_count *entry = stats->by_errno, *last = entry + AIO_ERRNOS - 1;
    while (entry < last && entry->count && entry->error != error)
        entry++;
    entry->error = entry < last ? error : 0;
    entry->count++;
    stats->errors++;
}

void aio_count_block(const struct block *block, uint64_t now)
{
    struct file *file = block->file;
    int kind = block->kind;
    aio_direction_stats *stats = &file->stats.kind[kind];
    if (block->verdict >= BLOCK_CONTINUE) {
        stats->retries += block->verdict != BLOCK_WRITE_BACK;
        stats->rereads += block->verdict == BLOCK_REREAD;
        return;
    }
    if (block->verdict < 0) {
        count_error(stats, -block->verdict);
    } else if (block->verdict == BLOCK_COMPLETE) {
        stats->ops++;
        stats->bytes += block->nbytes;
        stats->latency_ns += now - block->issued_ns;
        count_latency(&file->latencies[kind], now - block->issued_ns);
    }
    if (--stats->in_flight == 0)
        stats->busy_ns += now - file->busy_since[kind];
}

/* Add up the buckets of each octave. Octave e consists of the 2^BITS buckets from (e - BITS + 1) << BITS on, for
 * e >= BITS; below 2^BITS ns, a bucket is one nanosecond. */
static void add_octaves(const struct latencies *fine, uint64_t *octaves)
{
    _Static_assert(AIO_FINE_BUCKETS == (AIO_LATENCY_BUCKETS - AIO_FINE_BITS + 1) << AIO_FINE_BITS,
                   "the last fine bucket ends where the last octave does");
    for (unsigned i = 0; i < AIO_FINE_BUCKETS; i++) {
        unsigned octave = i >> AIO_FINE_BITS ? (i >> AIO_FINE_BITS) + AIO_FINE_BITS - 1
                                             : 31u - (unsigned)__builtin_clz(i | 1);
        octaves[octave] += fine->counts[i];
    }
}

int aio_stats(aio_context *context, int file, aio_file_stats *out)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    int error = -EINVAL;
    pthread_mutex_lock(&context->lock);
    if (file >= 0 && (unsigned)file < context->n_files) {
        const struct file *source = context->files[file];
        uint64_t now = aio_now_ns();
        *out = source->stats;
        /* Add the current queue-full and busy times, which stats gets when they end. */
        if (source->full_since && now > source->full_since)
            out->queue_full_ns += now - source->full_since;
        for (int kind = 0; kind < AIO_KINDS; kind++)
            if (out->kind[kind].in_flight && now > source->busy_since[kind])
                out->kind[kind].busy_ns += now - source->busy_since[kind];
        for (int kind = 0; kind < AIO_KINDS; kind++)
            add_octaves(&source->latencies[kind], out->kind[kind].latency);
        error = 0;
    }
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_oldest(aio_context *context, int file, int64_t *ticket, uint64_t *issued_ns)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    int error = -EINVAL;
    pthread_mutex_lock(&context->lock);
    if (file >= 0 && (unsigned)file < context->n_files) {
        *ticket = 0;
        *issued_ns = 0;
        for (unsigned i = 0; i < context->capacity; i++) {
            const struct block *block = &context->blocks[i];
            if (!block->request || block->file->index != file || (*ticket && block->issued_ns >= *issued_ns))
                continue;
            *ticket = (block->request->whole ? block->request->whole : block->request)->id;
            *issued_ns = block->issued_ns;
        }
        error = 0;
    }
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_latencies(aio_context *context, int file, int kind, uint64_t *counts, uint64_t *max_ns)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    int error = -EINVAL;
    pthread_mutex_lock(&context->lock);
    if (file >= 0 && (unsigned)file < context->n_files && kind >= 0 && kind < AIO_KINDS) {
        const struct latencies *latencies = &context->files[file]->latencies[kind];
        memcpy(counts, latencies->counts, sizeof latencies->counts);
        *max_ns = latencies->max_ns;
        error = 0;
    }
    pthread_mutex_unlock(&context->lock);
    return error;
}
