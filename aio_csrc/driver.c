/* The driver thread: takes requests apart into blocks, keeps each file at its queue depth, and judges every
 * completion.
 *
 * One turn of its loop
 *
 *     gather     under the lock: cut blocks off the requests at the heads of the queues, high priority first,
 *                while the file is below its depth and there are free blocks
 *     prepare    fill padded tails, sum what is to be written
 *     hand over  give the new blocks, and those to be continued, to the backend
 *     await      a completion or a new request, in one system call
 *     judge      complete, continue or fail each block that ended
 *     compare    the checksums of what was read
 *     absorb     under the lock: count them, settle requests
 *
 * Sums take as long as transfers on a fast disk, so only a few are made per turn, and a block that is back
 * leaves its place in the queue before it is summed: the disk works on meanwhile.
 *
 * Nothing of a completion is taken on trust: an error fails the request, a short transfer is continued from
 * where it stopped (on a direct file from the last aligned byte before), and one that no longer moves is an
 * error as well. A failed request issues no more blocks but is settled only when those in flight are back,
 * since they borrow its memory.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <string.h>

#include "system.h"

enum {
    MAX_STALLS = 100,     /* no aligned progress so often in a row: the end of the file, or hopeless */
    PATIENT_STALLS = 10,  /* EINTR or EAGAIN so often in a row: rest a moment before each more */
    MAX_REFUSALS = 10000, /* and after so many moments, some ten seconds, take it for the answer */
    MOMENT_NS = 1000000,
    SUMS_PER_TURN = 2, /* blocks, of what is written and of what was read */
    COMPLETE = 0,
    CONTINUE = 1,
};

static void pop(struct request *request)
{
    aio_request_dequeue(request);
    request->state = REQUEST_ISSUED;
}

/* How many of the registered regions begin at `address` or before. */
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

/* The number of the registered buffer that holds all of the range, or -1. Of regions that overlap, only the last
 * one that begins before the range is looked at: the others' memory is transferred as if it were not registered. */
static int find_buffer(const aio_context *context, const char *data, uint64_t nbytes)
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
    unsigned place = count_up_to(context, region->address);
    memmove(context->ready + place + 1, context->ready + place,
            (context->n_ready - place) * sizeof context->ready[0]);
    context->ready[place] = region;
    context->n_ready++;
}

static struct block *carve(aio_context *context, struct request *request, uint64_t now)
{
    struct block *block = context->free_blocks[--context->n_free_blocks];
    struct file *file = request->file;
    uint64_t left = request->nbytes - request->carved, offset = request->offset + request->carved;
    if (request->pieces) {
        uint64_t moved = request->carved % request->piece_nbytes;
        left = request->piece_nbytes - moved;
        offset = request->pieces[request->carved / request->piece_nbytes] + moved;
    }
    uint64_t size = left < context->block_size ? left : context->block_size;
    block->padded = file->direct && size < AIO_ALIGNMENT && request->kind != AIO_FLUSH;
    if (file->direct && !block->padded)
        size -=
            size % AIO_ALIGNMENT; /* an unaligned tail is a block by itself; what is before needs no copy */
    block->request = request;
    block->file = file;
    block->data = request->data ? request->data + request->carved : NULL;
    block->offset = offset;
    block->nbytes = size;
    block->stalls = 0;
    block->due_ns = 0;
    block->landed = false;
    block->issued_ns = now;
    block->op.kind = request->kind;
    block->op.file = file->index;
    block->op.fd = file->fd;
    block->op.data = block->padded ? block->bounce : block->data;
    block->op.offset = block->offset;
    block->op.nbytes = block->padded ? AIO_ALIGNMENT : size;
    block->op.buffer = find_buffer(context, block->op.data, block->op.nbytes);

    if (request->carved == 0)
        request->issued_ns = now;
    file->turn = request->kind == AIO_READ;
    request->carved += size;
    request->in_flight++;
    file->in_flight++;
    if (file->stats.kind[request->kind].in_flight++ == 0)
        file->busy_since[request->kind] = now;
    if (request->carved == request->nbytes)
        pop(request);
    return block;
}

/* Within a priority reads and writes take turns, block by block: a long request of one kind does not hold up
 * the other, and a disk does both at once as fast as in bursts. */
static struct request *next_request(const struct file *file)
{
    for (int priority = AIO_PRIORITIES; priority-- > 0;) {
        const struct queue *queues = file->queues[priority];
        struct request *first = queues[file->turn].head;
        if (first || (first = queues[!file->turn].head))
            return first;
    }
    return NULL;
}

/* Blocks that one file may have in flight: a backend that does few at once shares them out, so that a slow
 * file cannot take them all. */
static unsigned depth_of(const aio_context *context)
{
    if (context->backend.max_in_flight == 0)
        return context->queue_depth;
    unsigned share = context->backend.max_in_flight / context->n_files;
    share = share ? share : 1;
    return share < context->queue_depth ? share : context->queue_depth;
}

static void gather(aio_context *context)
{
    uint64_t now = aio_now_ns();
    for (unsigned i = 0; i < context->n_files; i++) {
        struct file *file = context->files[(context->next_file + i) % context->n_files];
        unsigned depth = depth_of(context);
        struct request *request;
        while ((request = next_request(file)) && context->n_free_blocks && file->in_flight < depth)
            context->fresh[context->n_fresh++] = carve(context, request, now);
        if (request && !file->full_since) {
            file->full_since = now;
        } else if (!request && file->full_since) {
            file->stats.queue_full_ns += now - file->full_since;
            file->full_since = 0;
        }
    }
    if (context->n_files)
        context->next_file = (context->next_file + 1) % context->n_files;
}

/* Ready new blocks and move them to the batch. Returns how many could not be: they are in `ended`. */
static unsigned prepare(aio_context *context)
{
    unsigned n_ended = 0, n_sums = 0, n_kept = 0;
    for (unsigned i = 0; i < context->n_fresh; i++) {
        struct block *block = context->fresh[i];
        bool sum = context->verify && block->op.kind == AIO_WRITE;
        if (sum && n_sums++ >= SUMS_PER_TURN) {
            context->fresh[n_kept++] = block;
            continue;
        }
        if (block->padded && block->op.kind == AIO_WRITE) {
            memcpy(block->bounce, block->data, block->nbytes);
            memset(block->bounce + block->nbytes, 0, AIO_ALIGNMENT - block->nbytes);
        }
        int error =
            sum ? aio_checksums_note(&block->file->checksums, block->op.data, block->offset, block->op.nbytes)
                : 0;
        if (error) {
            block->op.result = error;
            context->ended[n_ended++] = &block->op;
        } else {
            context->batch[context->n_batch++] = &block->op;
        }
    }
    context->n_fresh = n_kept;
    return n_ended;
}

/* COMPLETE, CONTINUE (op then describes the rest), or -errno. */
static int judge_transfer(const aio_context *context, struct block *block)
{
    struct aio_op *op = &block->op;
    int64_t moved = op->result;
    if (moved == -EINTR || moved == -EAGAIN) {
        block->due_ns = ++block->stalls > PATIENT_STALLS ? aio_now_ns() + MOMENT_NS : 0;
        return block->stalls < MAX_REFUSALS ? CONTINUE : (int)moved;
    }
    if (moved < 0)
        return (int)moved;
    if (op->kind == AIO_FLUSH || (uint64_t)moved == op->nbytes)
        return COMPLETE;
    if ((uint64_t)moved > op->nbytes)
        return -EIO;
    if (block->padded && op->kind == AIO_READ && (uint64_t)moved >= block->nbytes) {
        if (context->verify && ++block->stalls < MAX_STALLS)
            return CONTINUE; /* the sum is of the whole page: is this really its end? */
        memset(block->bounce + moved, 0, AIO_ALIGNMENT - (size_t)moved);
        return COMPLETE; /* it met the end of the file in the padding */
    }
    int stuck = op->kind == AIO_READ ? -ENODATA : -EIO;
    if (moved == 0)
        return stuck;
    moved -= block->file->direct ? moved % AIO_ALIGNMENT : 0;
    if (moved == 0)
        return ++block->stalls < MAX_STALLS ? CONTINUE : stuck;
    block->stalls = 0;
    op->data = (char *)op->data + moved;
    op->offset += (uint64_t)moved;
    op->nbytes -= (size_t)moved;
    return CONTINUE;
}

/* The verdicts on blocks that ended, without the lock, since their bytes are touched. Those of which a sum is
 * to be compared move to `landed`. Returns how many are left in `ended`. */
static unsigned judge(aio_context *context, unsigned n_ended)
{
    unsigned n_kept = 0;
    for (unsigned i = 0; i < n_ended; i++) {
        struct block *block = (struct block *)context->ended[i];
        block->verdict = judge_transfer(context, block);
        bool read = block->verdict == COMPLETE && block->op.kind == AIO_READ;
        if (read && block->padded)
            memcpy(block->data, block->bounce, block->nbytes);
        if (read && context->verify)
            context->landed[context->n_landed++] = block;
        else
            context->ended[n_kept++] = &block->op;
    }
    return n_kept;
}

/* Compare some of what landed with what was written there, and move it to `ended`; returns how many are there.
 */
static unsigned compare(aio_context *context, unsigned n_ended)
{
    unsigned n = context->n_landed < SUMS_PER_TURN ? context->n_landed : SUMS_PER_TURN;
    for (unsigned i = 0; i < n; i++) {
        struct block *block = context->landed[i];
        const char *read = block->padded ? block->bounce : block->data;
        uint64_t nbytes = block->padded ? AIO_ALIGNMENT : block->nbytes;
        block->verdict =
            aio_checksums_check(&block->file->checksums, read, block->offset, nbytes, &block->op.offset);
        context->ended[n_ended++] = &block->op;
    }
    context->n_landed -= n;
    memmove(context->landed, context->landed + n, context->n_landed * sizeof context->landed[0]);
    return n_ended;
}

static void note_latency(struct latencies *known, uint64_t ns)
{
    unsigned octave = 63u - (unsigned)__builtin_clzll(ns | 1);
    unsigned above = octave > AIO_FINE_BITS ? octave - AIO_FINE_BITS : 0; /* bits that tell nothing */
    uint64_t bucket = ((uint64_t)above << AIO_FINE_BITS) + (ns >> above);
    known->counts[bucket < AIO_FINE_BUCKETS ? bucket : AIO_FINE_BUCKETS - 1]++;
    known->max_ns = ns > known->max_ns ? ns : known->max_ns;
}

static void count_error(aio_direction_stats *stats, int error)
{
    aio_error_count *place = stats->by_errno, *last = place + AIO_ERRNOS - 1;
    while (place < last && place->count && place->error != error)
        place++;
    place->error = place < last ? error : 0;
    place->count++;
    stats->errors++;
}

static void count(const struct block *block, uint64_t now)
{
    struct file *file = block->file;
    int kind = block->op.kind;
    aio_direction_stats *stats = &file->stats.kind[kind];
    if (block->verdict == CONTINUE) {
        stats->retries++;
        return;
    }
    if (block->verdict < 0) {
        count_error(stats, -block->verdict);
    } else {
        stats->ops++;
        stats->bytes += block->nbytes;
        stats->latency_ns += now - block->issued_ns;
        note_latency(&file->latencies[kind], now - block->issued_ns);
    }
    if (--stats->in_flight == 0)
        stats->busy_ns += now - file->busy_since[kind];
}

static void absorb(aio_context *context, struct block *block, uint64_t now)
{
    struct request *request = block->request;
    count(block, now);
    if (block->verdict == CONTINUE) {
        context->batch[context->n_batch++] = &block->op;
        return;
    }
    if (block->verdict < 0) {
        if (request->result == 0) {
            request->result = block->verdict;
            request->failed_at = block->op.offset;
        }
        if (request->state == REQUEST_QUEUED)
            pop(request); /* issue no more of it */
    }
    context->free_blocks[context->n_free_blocks++] = block;
    block->file->in_flight -= !block->landed;
    if (--request->in_flight == 0 && request->state == REQUEST_ISSUED) {
        request->done_ns = now;
        aio_request_settle(context, request, request->result ? request->result : (int64_t)request->nbytes);
    }
}

/* Put those of the batch that need not rest a moment first; returns how many they are. */
static unsigned sort_due(aio_context *context)
{
    unsigned n_due = 0;
    uint64_t now = 0;
    for (unsigned i = 0; i < context->n_batch; i++) {
        struct aio_op *op = context->batch[i];
        uint64_t due_ns = ((const struct block *)op)->due_ns;
        if (due_ns && due_ns > (now = now ? now : aio_now_ns()))
            continue;
        context->batch[i] = context->batch[n_due];
        context->batch[n_due++] = op;
    }
    return n_due;
}

/* Returns how many are now in `ended`, with what the backend refused; *busy says that some are still to be
 * handed over and no completion may tell when. */
static unsigned hand_over(aio_context *context, unsigned n_ended, bool *busy)
{
    struct aio_backend *backend = &context->backend;
    unsigned first = 0, n_due = sort_due(context);
    *busy = n_due < context->n_batch;
    while (first < n_due) {
        int taken = backend->ops->submit(backend, context->batch + first, n_due - first);
        if (taken == -EAGAIN) {
            *busy |= context->n_begun == 0;
            break;
        }
        if (taken < 0) {
            struct aio_op *op = context->batch[first++];
            op->result = taken;
            context->ended[n_ended++] = op;
        } else {
            first += (unsigned)taken;
            context->n_begun += (unsigned)taken;
        }
    }
    context->n_batch -= first;
    memmove(context->batch, context->batch + first, context->n_batch * sizeof context->batch[0]);
    return n_ended;
}

/* Sleep until something ended or was submitted, and add what ended. */
static unsigned await(aio_context *context, unsigned n_ended, bool busy)
{
    struct aio_backend *backend = &context->backend;
    bool sums_to_do = context->n_fresh || context->n_landed;
    int64_t timeout_ns = n_ended || sums_to_do ? 0 : busy ? MOMENT_NS : -1;
    backend->ops->await(backend, timeout_ns);
    unsigned n = backend->ops->reap(backend, context->ended + n_ended, context->capacity - n_ended);
    context->n_begun -= n;
    return n_ended + n;
}

/* Hand new memory to the backend; lets go of the lock meanwhile. */
static void register_buffers(aio_context *context)
{
    struct aio_backend *backend = &context->backend;
    while (context->n_tried < context->n_regions) {
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
        context->n_tried++;
        pthread_cond_broadcast(&context->any);
    }
    context->info.flags |= backend->flags;
    context->info.files_error = backend->files_error;
}

void aio_drive(aio_context *context)
{
    pthread_mutex_lock(&context->lock);
    for (;;) {
        register_buffers(context);
        gather(context);
        if (context->closing && context->n_live == 0)
            break;
        context->asleep = true; /* from here on a submission must wake the backend, or await would miss it */
        pthread_mutex_unlock(&context->lock);

        bool busy;
        unsigned n_ended = prepare(context);
        n_ended = hand_over(context, n_ended, &busy);
        n_ended = await(context, n_ended, busy);
        n_ended = judge(context, n_ended);
        n_ended = compare(context, n_ended);

        pthread_mutex_lock(&context->lock);
        context->asleep = false;
        uint64_t now = aio_now_ns();
        for (unsigned i = 0; i < n_ended; i++)
            absorb(context, (struct block *)context->ended[i], now);
        for (unsigned i = 0; i < context->n_landed; i++) {
            struct block *block = context->landed[i];
            block->file->in_flight -= !block->landed;
            block->landed = true;
        }
    }
    pthread_mutex_unlock(&context->lock);
}
