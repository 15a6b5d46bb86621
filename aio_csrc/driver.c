/* The driver thread: takes requests apart into blocks, keeps each file at its queue depth, and judges every
 * completion.
 *
 * One turn of its loop
 *
 *     gather     under the lock: cut blocks off the requests at the heads of the queues, high priority first,
 *                while the file is below its depth and there are free blocks
 *     hand over  give them, and the blocks to be continued, to the backend
 *     await      a completion or aio_submit, in one poll
 *     absorb     under the lock: complete, continue or fail each block that ended; settle requests
 *
 * Nothing of a completion is taken on trust: an error fails the request, a short transfer is continued from
 * where it stopped (on a direct file from the last aligned byte before), and one that no longer moves is an
 * error as well. A failed request issues no more blocks but is settled only when those in flight are back,
 * since they borrow its memory.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

enum {
    MAX_STALLS =
        100, /* EINTR, EAGAIN or no aligned progress so often in a row: the end of the file, or hopeless */
    COMPLETE = 0,
    CONTINUE = 1,
};

uint64_t aio_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void pop(struct request *head)
{
    struct queue *queue = &head->file->queues[head->priority];
    queue->head = head->next;
    head->next = NULL;
    head->state = REQUEST_ISSUED;
}

static struct block *carve(aio_context *context, struct request *request, uint64_t now)
{
    struct block *block = context->free_blocks[--context->n_free_blocks];
    struct file *file = request->file;
    uint64_t left = request->nbytes - request->carved;
    uint64_t size = left < context->block_size ? left : context->block_size;
    bool padded = false;
    if (file->direct && size % AIO_ALIGNMENT) {
        padded = size < AIO_ALIGNMENT; /* a block by itself; what is before it needs no copy */
        size -= padded ? 0 : size % AIO_ALIGNMENT;
    }
    char *data = request->data ? request->data + request->carved : NULL;
    block->request = request;
    block->nbytes = size;
    block->stalls = 0;
    block->issued_ns = now;
    block->tail = padded && request->kind == AIO_READ ? data : NULL;
    if (padded && request->kind == AIO_WRITE) {
        memcpy(block->bounce, data, size);
        memset(block->bounce + size, 0, AIO_ALIGNMENT - size);
    }
    block->op.kind = request->kind;
    block->op.fd = file->fd;
    block->op.data = padded ? block->bounce : data;
    block->op.offset = request->offset + request->carved;
    block->op.nbytes = padded ? AIO_ALIGNMENT : size;

    request->carved += size;
    request->in_flight++;
    file->in_flight++;
    if (file->stats.kind[request->kind].in_flight++ == 0)
        file->busy_since[request->kind] = now;
    if (request->carved == request->nbytes)
        pop(request);
    return block;
}

static struct request *next_request(struct file *file)
{
    for (int priority = AIO_PRIORITIES; priority-- > 0;)
        if (file->queues[priority].head)
            return file->queues[priority].head;
    return NULL;
}

static void gather(aio_context *context)
{
    uint64_t now = aio_now_ns();
    for (unsigned i = 0; i < context->n_files; i++) {
        struct file *file = context->files[(context->next_file + i) % context->n_files];
        struct request *request;
        while (context->n_free_blocks && file->in_flight < context->queue_depth &&
               (request = next_request(file)))
            context->batch[context->n_batch++] = &carve(context, request, now)->op;
    }
    if (context->n_files)
        context->next_file = (context->next_file + 1) % context->n_files;
}

/* COMPLETE, CONTINUE (op then describes the rest), or -errno. */
static int judge(struct block *block, bool direct)
{
    struct aio_op *op = &block->op;
    int64_t moved = op->result;
    if (moved == -EINTR || moved == -EAGAIN)
        return ++block->stalls < MAX_STALLS ? CONTINUE : (int)moved;
    if (moved < 0)
        return (int)moved;
    if (op->kind == AIO_FLUSH || (uint64_t)moved == op->nbytes)
        return COMPLETE;
    if ((uint64_t)moved > op->nbytes)
        return -EIO;
    bool padded = op->data == block->bounce;
    if (padded && (uint64_t)moved >= block->nbytes)
        return COMPLETE; /* a read that met the end of the file in the padding */
    int stuck = op->kind == AIO_READ ? -ENODATA : -EIO;
    if (moved == 0)
        return stuck;
    moved -= direct ? moved % AIO_ALIGNMENT : 0;
    if (moved == 0)
        return ++block->stalls < MAX_STALLS ? CONTINUE : stuck;
    block->stalls = 0;
    op->data = (char *)op->data + moved;
    op->offset += (uint64_t)moved;
    op->nbytes -= (size_t)moved;
    return CONTINUE;
}

static unsigned bucket_of(uint64_t ns)
{
    unsigned bucket = ns ? 63u - (unsigned)__builtin_clzll(ns) : 0;
    return bucket < AIO_LATENCY_BUCKETS ? bucket : AIO_LATENCY_BUCKETS - 1;
}

static void count(struct block *block, int verdict, uint64_t now)
{
    struct file *file = block->request->file;
    int kind = block->op.kind;
    aio_direction_stats *stats = &file->stats.kind[kind];
    if (verdict == CONTINUE) {
        stats->retries++;
        return;
    }
    if (verdict < 0) {
        stats->errors++;
    } else {
        stats->ops++;
        stats->bytes += block->nbytes;
        stats->latency[bucket_of(now - block->issued_ns)]++;
    }
    if (--stats->in_flight == 0)
        stats->busy_ns += now - file->busy_since[kind];
}

static void absorb(aio_context *context, struct block *block, uint64_t now)
{
    struct request *request = block->request;
    int verdict = judge(block, request->file->direct);
    count(block, verdict, now);
    if (verdict == CONTINUE) {
        context->batch[context->n_batch++] = &block->op;
        return;
    }
    if (verdict < 0) {
        if (request->result == 0)
            request->result = verdict;
        if (request->state == REQUEST_QUEUED)
            pop(request); /* it was begun, so it is the head: issue no more of it */
    } else if (block->tail) {
        memcpy(block->tail, block->bounce, block->nbytes);
    }
    block->request = NULL;
    context->free_blocks[context->n_free_blocks++] = block;
    request->file->in_flight--;
    if (--request->in_flight == 0 && request->state == REQUEST_ISSUED)
        aio_request_settle(context, request, request->result ? request->result : (int64_t)request->nbytes);
}

/* Returns how many operations the backend refused; they are in `ended`, and *busy says that it took less than
 * all. */
static unsigned hand_over(aio_context *context, bool *busy)
{
    struct aio_backend *backend = &context->backend;
    unsigned first = 0, n_refused = 0;
    *busy = false;
    while (first < context->n_batch) {
        int taken = backend->ops->submit(backend, context->batch + first, context->n_batch - first);
        if (taken == -EAGAIN) {
            *busy = true;
            break;
        }
        if (taken < 0) {
            struct aio_op *op = context->batch[first++];
            op->result = taken;
            context->ended[n_refused++] = op;
        } else {
            first += (unsigned)taken;
            context->n_begun += (unsigned)taken;
        }
    }
    context->n_batch -= first;
    memmove(context->batch, context->batch + first, context->n_batch * sizeof context->batch[0]);
    return n_refused;
}

/* Sleep until something ended or was submitted, and add what ended. */
static unsigned await(aio_context *context, unsigned n_ended, bool busy)
{
    struct aio_backend *backend = &context->backend;
    struct pollfd sources[2] = {{.fd = context->wake_fd, .events = POLLIN},
                                {.fd = backend->event_fd, .events = POLLIN}};
    int timeout_ms = n_ended                         ? 0
                     : busy && context->n_begun == 0 ? 1
                                                     : -1; /* busy: no completion of ours will tell */
    if (poll(sources, 2, timeout_ms) <= 0)
        return n_ended;
    eventfd_t count;
    if (sources[0].revents)
        eventfd_read(context->wake_fd, &count);
    if (!sources[1].revents)
        return n_ended;
    unsigned n = backend->ops->reap(backend, context->ended + n_ended, context->capacity - n_ended);
    context->n_begun -= n;
    return n_ended + n;
}

void *aio_drive(void *argument)
{
    aio_context *context = argument;
    pthread_mutex_lock(&context->lock);
    for (;;) {
        gather(context);
        if (context->closing && context->n_live == 0)
            break;
        context->asleep = true; /* from here on a submission must write wake_fd, or poll would miss it */
        pthread_mutex_unlock(&context->lock);

        bool busy;
        unsigned n_ended = hand_over(context, &busy);
        n_ended = await(context, n_ended, busy);

        pthread_mutex_lock(&context->lock);
        context->asleep = false;
        uint64_t now = aio_now_ns();
        for (unsigned i = 0; i < n_ended; i++)
            absorb(context, (struct block *)context->ended[i], now);
    }
    pthread_mutex_unlock(&context->lock);
    return NULL;
}
