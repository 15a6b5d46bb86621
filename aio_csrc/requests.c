/* Tickets, and the order between requests. The caller of each function holds context->lock.
 *
 * Requests are stored in chunks that never move. A ticket is `generation << 20 | slot`: each reuse of a slot
 * increments the generation, so the comparison of a ticket with the current id of its slot says its state
 *
 *     ticket > id    never issued
 *     ticket < id    released: its slot was reused
 *     ticket == id   see request->state
 *
 * Requests that are ordered after a failed one fail until its ticket is released, so a caller keeps the tickets
 * that it may still name. A slot is thus free as soon as its ticket is released, however many requests fail.
 *
 * A cancelled read is not a failure: requests after it go on.
 *
 * The order is a graph of edges. Each edge is in two lists, that of the earlier request and that of its dependent.
 * A request is settled only when all requests that it waits for are, with or without an error, so a settled ticket
 * means that all before it are settled too. Requests that an urgent request waits for inherit its priority, or the
 * fetch of a parameter would wait for a whole queue of write-backs. Chains may be long; they are processed with a
 * work list, not by recursion.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>

enum { SLOT_BITS = 20 };
#define SLOT_MASK ((INT64_C(1) << SLOT_BITS) - 1)

void aio_wake_driver(aio_context *context)
{
    if (context->asleep) {
        /* Only the first request after the driver has gone to sleep pays for the system call. */
        context->asleep = false;
        context->backend.ops->wake(&context->backend);
    }
}

static int add_chunk(aio_context *context)
{
    uint64_t first = (uint64_t)context->n_chunks * REQUESTS_PER_CHUNK;
    if (first > (uint64_t)SLOT_MASK)
        return -EAGAIN;
    struct request **chunks = realloc(context->chunks, (context->n_chunks + 1) * sizeof *chunks);
    if (!chunks)
        return -ENOMEM;
    /* Before the next allocation, which may fail: the old array is gone. */
    context->chunks = chunks;
    struct request *chunk = calloc(REQUESTS_PER_CHUNK, sizeof *chunk);
    if (!chunk)
        return -ENOMEM;
    chunks[context->n_chunks++] = chunk;
    for (unsigned i = REQUESTS_PER_CHUNK; i-- > 0;) {
        chunk[i].id = (int64_t)(first + i); /* generation 0, which no ticket has */
        chunk[i].next = context->free_requests;
        context->free_requests = &chunk[i];
    }
    return 0;
}

/* The request of a ticket, or NULL with *error: -EINVAL if the ticket was never issued, -ESTALE if it is released. */
struct request *aio_request_find(aio_context *context, int64_t ticket, int *error)
{
    uint64_t slot = (uint64_t)(ticket & SLOT_MASK);
    *error = -EINVAL;
    if (ticket <= SLOT_MASK || slot / REQUESTS_PER_CHUNK >= context->n_chunks)
        return NULL;
    struct request *request = &context->chunks[slot / REQUESTS_PER_CHUNK][slot % REQUESTS_PER_CHUNK];
    if (ticket > request->id)
        return NULL;
    *error = -ESTALE;
    if (ticket < request->id || request->state == REQUEST_FREE)
        return NULL;
    *error = 0;
    return request;
}

/* The condition variable of a request. There are several, so that a completion wakes few other waiting threads. */
pthread_cond_t *aio_request_signal(aio_context *context, const struct request *request)
{
    return &context->done[(request->id & SLOT_MASK) % WAIT_SHARDS];
}

static struct queue *queue_of(struct request *request)
{
    return &request->file->queues[request->priority][request->kind != AIO_READ];
}

static void append(struct request *request)
{
    struct queue *queue = queue_of(request);
    request->next = NULL;
    request->previous = queue->tail;
    if (queue->tail)
        queue->tail->next = request;
    else
        queue->head = request;
    queue->tail = request;
}

void aio_request_dequeue(struct request *request)
{
    struct queue *queue = queue_of(request);
    if (request->previous)
        request->previous->next = request->next;
    else
        queue->head = request->next;
    if (request->next)
        request->next->previous = request->previous;
    else
        queue->tail = request->previous;
    request->next = request->previous = NULL;
}

/* Whether the dependent may be issued after a done request: that succeeded, or it is a read by whose own failure
 * nothing is lost: aio_cancel ended it, or the dependent writes and only had to wait until the read is over. */
static bool is_harmless(const struct request *request, const struct request *dependent)
{
    bool own_failure = request->kind == AIO_READ && !request->poisoned;
    return request->result >= 0 || (own_failure && (request->canceled || dependent->kind == AIO_WRITE));
}

/* Remove the edge from the list of its dependent. */
static void unlink_edge(struct edge *edge)
{
    *edge->link = edge->next_earlier;
    if (edge->next_earlier)
        edge->next_earlier->link = edge->link;
}

/* Make the result final, wake waiting threads, and push dependents that wait for no other request onto the work list,
 * so that the oldest is on top. */
static void finish(aio_context *context, struct request *request, int64_t result, struct request **work)
{
    /* State and result change under the lock that waiting threads hold when they look. */
    request->state = REQUEST_DONE;
    request->result = result;
    free(request->pieces);
    request->pieces = NULL;
    context->n_live--;
    if (request->watched & WATCHED_ALONE)
        pthread_cond_broadcast(aio_request_signal(context, request));
    if (request->watched & WATCHED_AMONG_OTHERS)
        pthread_cond_broadcast(&context->any);
    for (struct edge *edge = request->dependents, *next; edge; edge = next) {
        struct request *dependent = edge->dependent;
        /* Read before the edge is freed. */
        next = edge->next_dependent;
        unlink_edge(edge);
        free(edge);
        dependent->poisoned |= !is_harmless(request, dependent);
        if (--dependent->n_pending == 0) {
            dependent->next = *work;
            *work = dependent;
        }
    }
    request->dependents = NULL;
}

/* Queue the requests of a work list, which wait for no other request, or finish those that must not be issued. */
static void start(aio_context *context, struct request *work)
{
    while (work) {
        struct request *request = work;
        /* Read before append(), which links the request into a queue by the same field. */
        work = request->next;
        if (request->poisoned || request->canceled) {
            for (size_t i = 0; i < request->n_parts; i++)
                request->parts[i].result = -ECANCELED;
            finish(context, request, -ECANCELED, &work);
        } else if (request->nbytes == 0 && request->kind != AIO_FLUSH) {
            finish(context, request, 0, &work);
        } else if (request->parts) {
            request->state = REQUEST_DIVIDED;
            for (size_t i = 0; i < request->n_parts; i++) {
                request->parts[i].state = REQUEST_QUEUED;
                append(&request->parts[i]);
            }
            aio_wake_driver(context);
        } else {
            request->state = REQUEST_QUEUED;
            append(request);
            aio_wake_driver(context);
        }
    }
}

/* Settle a part of a vector request. Returns whether it was the last one: then the whole has its result. */
static bool settle_part(struct request *part, int64_t result)
{
    struct request *whole = part->whole;
    part->state = REQUEST_DONE;
    part->result = result;
    /* A failure says more than the cancellation of other parts. */
    if (result < 0 && (whole->result == 0 || whole->result == -ECANCELED)) {
        whole->result = result;
        whole->failed_at = part->failed_at;
        whole->file = part->file;
    }
    if (part->issued_ns && (!whole->issued_ns || part->issued_ns < whole->issued_ns))
        whole->issued_ns = part->issued_ns;
    if (part->passed)
        whole->passed = part->passed;
    if (part->done_ns > whole->done_ns)
        whole->done_ns = part->done_ns;
    return --whole->n_open == 0;
}

void aio_request_settle(aio_context *context, struct request *request, int64_t result)
{
    struct request *work = NULL;
    if (request->whole) {
        if (!settle_part(request, result))
            return;
        request = request->whole;
        result = request->result ? request->result : (int64_t)request->nbytes;
    }
    finish(context, request, result, &work);
    start(context, work);
}

/* End a queued request with -ECANCELED: none of its blocks will be issued any more. */
static void take_back(aio_context *context, struct request *request)
{
    aio_request_dequeue(request);
    request->state = REQUEST_ISSUED;
    request->result = -ECANCELED;
    /* Otherwise absorb() settles it after its last block: until then, the kernel uses its memory. */
    if (request->in_flight == 0)
        aio_request_settle(context, request, -ECANCELED);
}

/* Cancel the queued parts. */
static int cancel_parts(aio_context *context, struct request *whole)
{
    size_t n_queued = 0;
    for (size_t i = 0; i < whole->n_parts; i++)
        n_queued += whole->parts[i].state == REQUEST_QUEUED;
    if (n_queued == 0)
        return whole->canceled ? 0 : -EBUSY;
    /* Before the last part is settled, which tells the dependents why. */
    whole->canceled = true;
    for (size_t i = 0; i < whole->n_parts; i++)
        if (whole->parts[i].state == REQUEST_QUEUED)
            take_back(context, &whole->parts[i]);
    return 0;
}

int aio_request_cancel(aio_context *context, struct request *request)
{
    if (request->state == REQUEST_DONE)
        return -EALREADY;
    if (request->state == REQUEST_DIVIDED)
        return cancel_parts(context, request);
    if (request->state == REQUEST_ISSUED && !request->canceled)
        return -EBUSY;
    request->canceled = true;
    if (request->state == REQUEST_QUEUED)
        take_back(context, request);
    return 0;
}

/* Give a queued request, or the queued parts of a divided one, a higher priority. */
static void raise_priority(struct request *request, int priority)
{
    for (size_t i = 0; i < request->n_parts; i++)
        raise_priority(&request->parts[i], priority);
    if (request->state == REQUEST_QUEUED) {
        aio_request_dequeue(request);
        request->priority = priority;
        append(request);
    }
    request->priority = priority;
}

/* Raise the priority of all requests that `request` waits for, directly or not, to that of `request`. */
static void urge(struct request *request)
{
    struct request *work = request;
    request->next = NULL;
    while (work) {
        request = work;
        work = request->next;
        for (struct edge *edge = request->earlier; edge; edge = edge->next_earlier) {
            struct request *earlier = edge->earlier;
            if (earlier->priority >= request->priority)
                continue; /* all requests that it waits for have at least this priority, too */
            if (earlier->state == REQUEST_BLOCKED) {
                earlier->next = work;
                work = earlier;
            }
            raise_priority(earlier, request->priority);
        }
    }
}

static void free_edges(struct edge *edges)
{
    for (struct edge *next; edges; edges = next) {
        next = edges->next_dependent;
        free(edges);
    }
}

/* Order `request` after the tickets in `after`. All memory is allocated first: on an error nothing is changed. */
static int order_after(aio_context *context, struct request *request, const int64_t *after, size_t n_after)
{
    struct edge *spare = NULL;
    int error;
    for (size_t i = 0; i < n_after; i++) {
        struct edge *edge = malloc(sizeof *edge);
        if (edge) {
            edge->next_dependent = spare;
            spare = edge;
        }
        error = -ENOMEM;
        if (!edge || (!aio_request_find(context, after[i], &error) && error != -ESTALE)) {
            free_edges(spare);
            return error;
        }
    }
    for (size_t i = 0; i < n_after; i++) {
        struct request *earlier = aio_request_find(context, after[i], &error);
        if (!earlier)
            continue;
        if (earlier->state == REQUEST_DONE) {
            request->poisoned |= !is_harmless(earlier, request);
            continue;
        }
        struct edge *edge = spare;
        spare = edge->next_dependent;
        edge->earlier = earlier;
        edge->dependent = request;
        edge->next_dependent = earlier->dependents;
        earlier->dependents = edge;
        edge->next_earlier = request->earlier;
        if (edge->next_earlier)
            edge->next_earlier->link = &edge->next_earlier;
        edge->link = &request->earlier;
        request->earlier = edge;
        request->n_pending++;
    }
    free_edges(spare);
    return 0;
}

int64_t aio_request_add(aio_context *context, const struct request *parameters, const int64_t *after,
                        size_t n_after)
{
    int error = context->free_requests ? 0 : add_chunk(context);
    if (error)
        return error;
    struct request *request = context->free_requests;
    struct request *next_free = request->next;
    int64_t id = request->id;
    *request = *parameters;
    request->failed_at = parameters->offset; /* until a block fails */
    /* The old id until order_after has succeeded: a request cannot be ordered after itself. */
    request->id = id;
    request->state = REQUEST_FREE;
    error = order_after(context, request, after, n_after);
    if (error) {
        request->next = next_free;
        /* Still the caller's. */
        request->parts = NULL;
        return error;
    }
    /* Only now, when nothing can fail any more, does the slot leave the free list. */
    context->free_requests = next_free;
    /* 2^43 generations: at a million requests per second, one slot lasts a hundred days. */
    request->id = id + (INT64_C(1) << SLOT_BITS);
    request->state = REQUEST_BLOCKED;
    for (size_t i = 0; i < request->n_parts; i++)
        request->parts[i].whole = request;
    request->next = NULL;
    /* Before start(), which may finish the request at once and count it down. */
    context->n_live++;
    if (request->n_pending == 0)
        start(context, request);
    else
        urge(request);
    return request->id;
}

void aio_request_release(aio_context *context, struct request *request)
{
    free(request->parts);
    request->parts = NULL;
    request->state = REQUEST_FREE;
    request->next = context->free_requests;
    context->free_requests = request;
}

/* Cancel all requests of which a block is not issued. The others end with their blocks in flight. */
void aio_requests_cancel(aio_context *context)
{
    for (unsigned i = 0; i < context->n_chunks; i++)
        for (unsigned j = 0; j < REQUESTS_PER_CHUNK; j++)
            if (context->chunks[i][j].state < REQUEST_DONE)
                context->chunks[i][j].poisoned = true;
    /* After all are poisoned: a request that is settled here adds none behind it to a queue. */
    for (unsigned i = 0; i < context->n_files; i++)
        for (int number = 0; number < 2 * AIO_PRIORITIES; number++) {
            const struct queue *queue = &context->files[i]->queues[number / 2][number % 2];
            while (queue->head)
                take_back(context, queue->head);
        }
}

void aio_requests_free(aio_context *context)
{
    for (unsigned i = 0; i < context->n_chunks; i++) {
        for (unsigned j = 0; j < REQUESTS_PER_CHUNK; j++) {
            free_edges(context->chunks[i][j].dependents);
            free(context->chunks[i][j].parts);
        }
        free(context->chunks[i]);
    }
    free(context->chunks);
}
