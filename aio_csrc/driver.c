/* The driver thread: splits requests into blocks, keeps each file at its queue depth, and evaluates every
 * completion.
 *
 * One iteration of its loop
 *
 *     gather     with the lock: split blocks off the requests at the heads of the queues, high priority first,
 *                while the file is below its queue depth and there are free blocks
 *     prepare    fill the edges of blocks to be written
 *     collect    with checksums: take the blocks that the workers have summed
 *     hand_over  submit new blocks, and blocks to be continued, to the backend
 *     await      wait for a completion, a checksum or a new request, in one system call
 *     judge      complete, continue or fail each block that has ended
 *     absorb     with the lock: count the blocks, settle requests
 *
 * Checksums take as long as transfers on a fast disk, so workers compute them (options.verify): of a block to be written
 * between prepare and hand_over, of a block that was read after judge. The driver stores and compares them. A block that
 * was read leaves the queue depth of its file before it is summed: the disk works meanwhile.
 *
 * A direct file takes whole blocks of the device (file->alignment). What a request transfers of one, its edge, passes
 * through a buffer of the engine. An edge is a tail within a page, which is padded; or, where the device's blocks are
 * larger than a page, any piece of one: to write it, the block is read, merged and written. No other write of that block
 * is in flight meanwhile; transfers of the same bytes are ordered by the caller.
 *
 * Every completion is checked (judge.c). A request that has failed or is taken back issues no more blocks, but is settled
 * only when its blocks in flight have ended, because they borrow its memory. These are not continued either, except for a
 * write that is taken back: each of its blocks is written as a whole or not at all, so that its checksums are right.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "system.h"

/* Take a request out of its queue: none of its blocks will be issued any more. */
static void pop(struct request *request)
{
    aio_request_dequeue(request);
    request->state = REQUEST_ISSUED;
}

/* What is left of the piece that a request has come to. */
static struct piece rest_of_piece(const struct request *request)
{
    const struct piece all = {request->data, request->offset, request->nbytes};
    const struct piece *piece = request->pieces ? &request->pieces[request->piece] : &all;
    uint64_t start = request->piece_carved;
    return (struct piece){piece->data ? piece->data + start : NULL, piece->offset + start,
                          piece->nbytes - start};
}

/* The next block of a request. */
static struct piece next_block(const aio_context *context, const struct request *request)
{
    struct piece next = rest_of_piece(request);
    next.nbytes = next.nbytes < context->block_size ? next.nbytes : context->block_size;
    uint64_t alignment = request->file->alignment;
    if (alignment && request->kind != AIO_FLUSH) {
        uint64_t room = alignment - next.offset % alignment;
        /* An edge becomes a separate block, so that only the edge is copied. */
        if (room < alignment)
            next.nbytes = next.nbytes < room ? next.nbytes : room;
        else if (next.nbytes > alignment)
            next.nbytes -= next.nbytes % alignment;
    }
    return next;
}

/* Whether a block in flight and the next one of this request write the same block of the device, and one of them merges:
 * it would write back what it has read before the other one was written. */
static bool must_wait(const aio_context *context, const struct request *request)
{
    uint64_t alignment = request->file->alignment;
    if (alignment <= AIO_ALIGNMENT || request->kind != AIO_WRITE)
        return false;
    struct piece next = next_block(context, request);
    bool merges = next.nbytes < alignment;
    for (unsigned i = 0; i < context->capacity; i++) {
        const struct block *block = &context->blocks[i];
        if (block->request && block->file == request->file && block->kind == AIO_WRITE &&
            (merges || block->merges) &&
            block->offset / alignment <= (next.offset + next.nbytes - 1) / alignment &&
            next.offset / alignment <= (block->offset + block->nbytes - 1) / alignment)
            return true;
    }
    return false;
}

/* Split the next block off a queued request, and count it as in flight. The request leaves its queue with its last
 * block. */
static struct block *carve(aio_context *context, struct request *request, uint64_t now)
{
    struct block *block = context->free_blocks[--context->n_free_blocks];
    struct file *file = request->file;
    struct piece next = next_block(context, request);
    uint64_t size = next.nbytes;
    bool ends_piece = size == rest_of_piece(request).nbytes;
    block->kind = request->kind;
    block->edge = size < file->alignment && request->kind != AIO_FLUSH;
    block->start = block->edge ? next.offset % file->alignment : 0;
    block->merges = block->edge && file->alignment > AIO_ALIGNMENT && request->kind == AIO_WRITE;
    block->request = request;
    block->file = file;
    block->data = next.data;
    block->offset = next.offset;
    block->nbytes = size;
    block->stalls = 0;
    block->rereads = 0;
    block->due_ns = 0;
    block->landed = false;
    block->issued_ns = now;
    block->op.kind = block->merges ? AIO_READ : request->kind;
    block->op.file = file->index;
    block->op.fd = file->fd;
    block->op.direct = file->alignment != 0;
    block->op.data = block->edge ? block->bounce : block->data;
    block->op.offset = block->offset - block->start;
    block->op.nbytes = block->edge ? file->alignment : size;
    block->op.buffer = aio_buffer_find(context, block->op.data, block->op.nbytes);

    if (request->carved == 0)
        request->issued_ns = now;
    file->turn = request->kind == AIO_READ;
    request->carved += size;
    request->piece_carved = ends_piece ? 0 : request->piece_carved + size;
    request->piece += ends_piece;
    /* Before the lock is released: until the block has ended, the request cannot be settled, and its memory is
     * borrowed. */
    request->in_flight++;
    file->in_flight++;
    if (file->stats.kind[request->kind].in_flight++ == 0)
        file->busy_since[request->kind] = now;
    if (request->carved == request->nbytes)
        pop(request);
    return block;
}

/* The request whose block is issued next, or NULL. Within a priority, reads and writes alternate block by block: a
 * long request of one kind does not delay the other, and a disk does both at once as fast as in bursts. */
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

/* Blocks that one file may have in flight. If the backend runs few operations at once, they are divided over the
 * files, so that a slow file cannot occupy all. */
static unsigned depth_of(const aio_context *context, const struct file *file)
{
    const struct aio_backend *backend = &context->backend;
    if (backend->max_in_flight == 0 || (backend->only_buffered && file->alignment))
        return context->queue_depth;
    unsigned n_files = backend->only_buffered ? context->n_buffered : context->n_files;
    unsigned depth = backend->max_in_flight / n_files;
    depth = depth ? depth : 1;
    return depth < context->queue_depth ? depth : context->queue_depth;
}

static void gather(aio_context *context)
{
    uint64_t now = aio_now_ns();
    for (unsigned i = 0; i < context->n_files; i++) {
        /* The array may move in aio_add_file, which needs the lock, too. The files stay where they are. */
        struct file *file = context->files[(context->next_file + i) % context->n_files];
        unsigned depth = depth_of(context, file);
        struct request *request;
        /* A request that waits for a merge is tried again when that has ended. */
        while ((request = next_request(file)) && context->n_free_blocks && file->in_flight < depth &&
               !must_wait(context, request))
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

static uint64_t round_to_page(uint64_t nbytes)
{
    return (nbytes + AIO_ALIGNMENT - 1) & -(uint64_t)AIO_ALIGNMENT;
}

/* The bytes of a block that have checksums: at an edge, whole pages of the engine's buffer. */
static char *summed_bytes(const struct block *block, uint64_t *nbytes)
{
    *nbytes = block->edge ? round_to_page(block->nbytes) : block->nbytes;
    return block->edge ? block->bounce + block->start : block->data;
}

/* Copy what an edge writes into the engine's buffer, up to the end of its last page. The caller's memory does not
 * change before the ticket is done, so it can be copied without the lock. */
static void fill_edge(const struct block *block)
{
    char *at = block->bounce + block->start;
    memcpy(at, block->data, block->nbytes);
    memset(at + block->nbytes, 0, round_to_page(block->nbytes) - block->nbytes);
}

/* Let a worker sum the whole pages of a block. Returns 0 or -ENOMEM. */
static int begin_sums(aio_context *context, struct block *block)
{
    uint64_t nbytes;
    char *data = summed_bytes(block, &nbytes);
    struct page_range pages = aio_whole_pages(block->offset, nbytes);
    uint64_t n = pages.end - pages.first;
    struct aio_op *op = &block->sum;
    /* At least one, because malloc(0) may return NULL. */
    op->sums = malloc((n ? n : 1) * sizeof *op->sums);
    if (!op->sums)
        return -ENOMEM;
    op->kind = AIO_CHECKSUM;
    op->data = data + (n ? pages.first * AIO_ALIGNMENT - block->offset : 0);
    op->nbytes = n * AIO_ALIGNMENT;
    context->summers.ops->submit(&context->summers, &op, 1);
    return 0;
}

/* Prepare new blocks, and move them to `batch` or to the workers that sum them. Blocks that cannot be summed move to
 * `ended`. Returns the number of blocks there. */
static unsigned prepare(aio_context *context)
{
    unsigned n_ended = 0;
    for (unsigned i = 0; i < context->n_fresh; i++) {
        struct block *block = context->fresh[i];
        bool writes = block->kind == AIO_WRITE;
        if (block->edge && writes)
            fill_edge(block);
        if (!context->verify || !writes)
            context->batch[context->n_batch++] = &block->op;
        else if ((block->op.result = begin_sums(context, block)))
            context->ended[n_ended++] = &block->op;
    }
    context->n_fresh = 0;
    return n_ended;
}

/* Take the blocks that workers have summed. Blocks to be written move to `batch`, or to `ended` if their checksums
 * cannot be stored; blocks that were read get their verdict and move to `compared`. Returns the number of blocks in
 * `ended`. */
static unsigned collect(aio_context *context, unsigned n_ended)
{
    if (!context->verify)
        return n_ended;
    unsigned n = context->summers.ops->reap(&context->summers, context->summed, context->capacity);
    for (unsigned i = n; i-- > 0;) { /* from the first one that was summed: reap returns the last one first */
        struct block *block = (struct block *)((char *)context->summed[i] - offsetof(struct block, sum));
        struct checksums *known = &block->file->checksums;
        uint64_t nbytes;
        summed_bytes(block, &nbytes);
        if (block->kind == AIO_READ) {
            block->verdict =
                aio_checksums_compare(known, block->offset, nbytes, block->sum.sums, &block->op.offset);
            context->compared[context->n_compared++] = &block->op;
        } else if ((block->op.result = aio_checksums_store(known, block->offset, nbytes, block->sum.sums))) {
            context->ended[n_ended++] = &block->op;
        } else {
            context->batch[context->n_batch++] = &block->op;
        }
        free(block->sum.sums);
    }
    return n_ended;
}

/* Set the verdict of each block in `ended`. Runs without the lock, because it copies bytes. Blocks whose checksums
 * must be compared go to the workers, and to `landed`. Returns the number of blocks that stay in `ended`, with those in
 * `compared`. */
static unsigned judge(aio_context *context, unsigned n_ended)
{
    unsigned n_judged = 0;
    for (unsigned i = 0; i < n_ended; i++) {
        struct block *block = (struct block *)context->ended[i];
        block->verdict = aio_judge(context, block);
        bool read = block->verdict == BLOCK_COMPLETE && block->kind == AIO_READ;
        if (block->verdict == BLOCK_COMPLETE && block->merges && block->op.kind == AIO_READ) {
            fill_edge(block);
            block->op.kind = AIO_WRITE;
            block->stalls = 0;
            block->verdict = BLOCK_WRITE_BACK;
        }
        /* Before the request can be settled: then the caller owns the memory again. */
        if (read && block->edge)
            memcpy(block->data, block->bounce + block->start, block->nbytes);
        if (read && context->verify && (block->verdict = begin_sums(context, block)) == 0)
            context->landed[context->n_landed++] = block;
        else
            context->ended[n_judged++] = &block->op;
    }
    for (unsigned i = 0; i < context->n_compared; i++)
        context->ended[n_judged++] = context->compared[i];
    context->n_compared = 0;
    return n_judged;
}

/* Whether a block that is not complete is not submitted again. */
static bool is_given_up(const struct block *block)
{
    int64_t result = block->request->result;
    return result < 0 && (block->kind == AIO_READ || result != -ECANCELED);
}

/* Act on the verdict of a block that has ended: submit it again, or free it and settle its request if it was the
 * last one. */
static void absorb(aio_context *context, struct block *block, uint64_t now)
{
    struct request *request = block->request;
    if (block->verdict >= BLOCK_CONTINUE && is_given_up(block))
        block->verdict = BLOCK_GIVEN_UP;
    aio_count_block(block, now);
    if (block->verdict >= BLOCK_CONTINUE) {
        if (block->verdict == BLOCK_REREAD)
            request->passed = block->op.result;
        context->batch[context->n_batch++] = &block->op;
        return;
    }
    if (block->verdict < 0) {
        if (request->result == 0) {
            /* The first error stays, whichever block it is of. */
            request->result = block->verdict;
            request->failed_at = block->op.offset > block->offset ? block->op.offset : block->offset;
        }
        if (request->state == REQUEST_QUEUED)
            pop(request); /* issue no more blocks of a failed request */
    }
    block->request = NULL;
    block->merges = false; /* the next merge of this block of the device may begin */
    context->free_blocks[context->n_free_blocks++] = block;
    block->file->in_flight -= !block->landed;
    request->done_ns = now;
    /* Only the last block: while others are in flight, the kernel uses the request's memory. */
    if (--request->in_flight == 0 && request->state == REQUEST_ISSUED)
        aio_request_settle(context, request, request->result ? request->result : (int64_t)request->nbytes);
}

/* Give up blocks that wait for their next submission, and whose requests have failed or were taken back since. */
static void drop_waiting(aio_context *context, uint64_t now)
{
    unsigned n = context->n_batch;
    context->n_batch = 0;
    for (unsigned i = 0; i < n; i++) {
        struct block *block = (struct block *)context->batch[i];
        if (is_given_up(block)) {
            block->verdict = BLOCK_GIVEN_UP;
            absorb(context, block, now);
        } else {
            context->batch[context->n_batch++] = &block->op;
        }
    }
}

/* Move the blocks of the batch that are due to its front. Returns their number. */
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

/* Submit the blocks that are due. Blocks that the backend refuses move to `ended`; returns the number of blocks
 * there. *busy: blocks are left, and possibly no completion will end the await before they can be submitted. */
static unsigned hand_over(aio_context *context, unsigned n_ended, bool *busy)
{
    struct aio_backend *backend = &context->backend;
    unsigned first = 0, n_due = sort_due(context);
    *busy = n_due < context->n_batch;
    while (first < n_due) {
        int accepted = backend->ops->submit(backend, context->batch + first, n_due - first);
        if (accepted == -EAGAIN) {
            *busy |= context->n_begun == 0;
            break;
        }
        if (accepted < 0) {
            struct aio_op *op = context->batch[first++];
            op->result = accepted;
            context->ended[n_ended++] = op;
        } else {
            first += (unsigned)accepted;
            context->n_begun += (unsigned)accepted;
        }
    }
    context->n_batch -= first;
    memmove(context->batch, context->batch + first, context->n_batch * sizeof context->batch[0]);
    return n_ended;
}

/* Sleep until an operation has ended or a request is submitted, and append the operations that have ended to
 * `ended`. Returns the number of blocks there. */
static unsigned await(aio_context *context, unsigned n_ended, bool busy)
{
    struct aio_backend *backend = &context->backend;
    int64_t timeout_ns = n_ended || context->n_compared ? 0 : busy ? AIO_PAUSE_NS : -1;
    backend->ops->await(backend, timeout_ns);
    unsigned n = backend->ops->reap(backend, context->ended + n_ended, context->capacity - n_ended);
    context->n_begun -= n;
    return n_ended + n;
}

void aio_drive(aio_context *context)
{
    pthread_mutex_lock(&context->lock);
    for (;;) {
        aio_buffers_register(context);
        gather(context);
        if (context->closing && context->n_live == 0)
            break;
        /* Under the same lock as gather(): a submission from here on calls wake, which ends the await below. */
        context->asleep = true;
        pthread_mutex_unlock(&context->lock);

        bool busy;
        unsigned n_ended = prepare(context);
        n_ended = collect(context, n_ended);
        n_ended = hand_over(context, n_ended, &busy);
        n_ended = await(context, n_ended, busy);
        n_ended = judge(context, n_ended);

        pthread_mutex_lock(&context->lock);
        /* The lock is held again: from here to gather(), a submission needs no wake. */
        context->asleep = false;
        uint64_t now = aio_now_ns();
        for (unsigned i = 0; i < n_ended; i++)
            absorb(context, (struct block *)context->ended[i], now);
        drop_waiting(context, now);
        /* The kernel is done with these blocks: let the next ones of their files be issued. */
        for (unsigned i = 0; i < context->n_landed; i++) {
            struct block *block = context->landed[i];
            block->file->in_flight--;
            block->landed = true;
        }
        context->n_landed = 0;
    }
    pthread_mutex_unlock(&context->lock);
}
