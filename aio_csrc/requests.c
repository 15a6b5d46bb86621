/* Tickets, and what waits for what.
 *
 * Requests live in chunks that never move. A ticket is `generation << 20 | slot`: reusing a slot raises the
 * generation, so an old ticket is told from a new one, and comparing a ticket with the slot's present id says
 * what became of it
 *
 *     ticket > id    was never given out
 *     ticket < id    released, and it succeeded: its slot was reused
 *     ticket == id   look at the state
 *
 * A request that failed must go on failing what is ordered after it, even when its ticket was released long
 * before (the caller has seen the error, but another one may still be about to read those bytes). Its slot is
 * therefore retired, not reused: a tombstone of some hundred bytes. Failures are rare, and a run that has
 * many has other troubles.
 *
 * Ordering is a count: a request knows how many others it waits for, and each of those keeps a list of edges
 * to whom it holds up. A request is settled only when all it waits for are, failed or not, so a settled
 * ticket means that all before it are over too. Chains may be long; they are walked with a list, not by
 * recursion.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>

enum { SLOT_BITS = 20 };
#define SLOT_MASK ((INT64_C(1) << SLOT_BITS) - 1)

void aio_wake_driver(aio_context *context)
{
    if (context->asleep) {
        context->asleep = false;
        eventfd_write(context->wake_fd, 1);
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
    context->chunks = chunks;
    struct request *chunk = calloc(REQUESTS_PER_CHUNK, sizeof *chunk);
    if (!chunk)
        return -ENOMEM;
    chunks[context->n_chunks++] = chunk;
    for (unsigned i = REQUESTS_PER_CHUNK; i-- > 0;) {
        chunk[i].id = (int64_t)(first + i); /* generation 0: given out to nobody */
        chunk[i].next = context->free_requests;
        context->free_requests = &chunk[i];
    }
    return 0;
}

/* The request of a ticket, or NULL with *error: -EINVAL if there was never such a ticket, -ESTALE if it was
 * released. A retired one is returned with -ESTALE as well. */
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
    if (request->state != REQUEST_RETIRED)
        *error = 0;
    return request;
}

static void enqueue(aio_context *context, struct request *request)
{
    struct queue *queue = &request->file->queues[request->priority];
    request->state = REQUEST_QUEUED;
    request->next = NULL;
    if (queue->head)
        queue->tail->next = request;
    else
        queue->head = request;
    queue->tail = request;
    aio_wake_driver(context);
}

/* Make the result final and move those that waited for this one alone to the work list, the earliest on top.
 */
static void finish(aio_context *context, struct request *request, int64_t result, struct request **work)
{
    request->state = REQUEST_DONE;
    request->result = result;
    context->n_live--;
    if (request->watched)
        pthread_cond_broadcast(&context->done);
    for (struct edge *edge = request->dependents, *next; edge; edge = next) {
        struct request *dependent = edge->dependent;
        next = edge->next;
        free(edge);
        dependent->poisoned |= result < 0;
        if (--dependent->n_pending == 0) {
            dependent->next = *work;
            *work = dependent;
        }
    }
    request->dependents = NULL;
}

/* Start what nothing holds up any more. */
static void start(aio_context *context, struct request *work)
{
    while (work) {
        struct request *request = work;
        work = request->next;
        if (request->poisoned)
            finish(context, request, -ECANCELED, &work);
        else if (request->nbytes == 0 && request->kind != AIO_FLUSH)
            finish(context, request, 0, &work);
        else
            enqueue(context, request);
    }
}

void aio_request_settle(aio_context *context, struct request *request, int64_t result)
{
    struct request *work = NULL;
    finish(context, request, result, &work);
    start(context, work);
}

static void free_edges(struct edge *edges)
{
    for (struct edge *next; edges; edges = next) {
        next = edges->next;
        free(edges);
    }
}

/* Hang `request` behind the tickets in `after`; nothing is changed unless all of it can be done. */
static int order_after(aio_context *context, struct request *request, const int64_t *after, size_t n_after)
{
    struct edge *spare = NULL;
    int error;
    for (size_t i = 0; i < n_after; i++) {
        struct edge *edge = malloc(sizeof *edge);
        if (edge) {
            edge->next = spare;
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
        if (earlier->state == REQUEST_DONE || earlier->state == REQUEST_RETIRED) {
            request->poisoned |= earlier->result < 0;
            continue;
        }
        struct edge *edge = spare;
        spare = edge->next;
        edge->dependent = request;
        edge->next = earlier->dependents;
        earlier->dependents = edge;
        request->n_pending++;
    }
    free_edges(spare);
    return 0;
}

int64_t aio_request_add(aio_context *context, const struct request *wanted, const int64_t *after,
                        size_t n_after)
{
    int error = context->free_requests ? 0 : add_chunk(context);
    if (error)
        return error;
    struct request *request = context->free_requests;
    struct request *rest = request->next;
    int64_t id = request->id;
    *request = *wanted;
    request->id = id; /* the old one, until nothing can fail: a request cannot be ordered after itself */
    request->state = REQUEST_FREE;
    error = order_after(context, request, after, n_after);
    if (error) {
        request->next = rest;
        return error;
    }
    context->free_requests = rest;
    request->id =
        id + (INT64_C(1) << SLOT_BITS); /* 2^43 generations: at a million a second, a hundred days per slot */
    request->state = REQUEST_BLOCKED;
    request->next = NULL;
    context->n_live++;
    if (request->n_pending == 0)
        start(context, request);
    return request->id;
}

void aio_request_release(aio_context *context, struct request *request)
{
    if (request->result < 0) {
        request->state = REQUEST_RETIRED;
        return;
    }
    request->state = REQUEST_FREE;
    request->next = context->free_requests;
    context->free_requests = request;
}

/* Settle with -ECANCELED whatever has no block in flight and none behind it; what was begun goes on to its
 * end. */
void aio_requests_cancel(aio_context *context)
{
    for (unsigned i = 0; i < context->n_chunks; i++)
        for (unsigned j = 0; j < REQUESTS_PER_CHUNK; j++)
            context->chunks[i][j].poisoned = true; /* of those done already nobody asks any more */
    for (unsigned i = 0; i < context->n_files; i++)
        for (int priority = 0; priority < AIO_PRIORITIES; priority++) {
            struct queue *queue = &context->files[i]->queues[priority];
            struct request *head = queue->head, *unissued = head;
            if (head && head->carved > 0) { /* only a head can have been begun */
                unissued = head->next;
                head->next = NULL;
                queue->tail = head;
            } else {
                queue->head = queue->tail = NULL;
            }
            start(context, unissued); /* all poisoned: settles them and whatever waits for them alone */
        }
}

void aio_requests_free(aio_context *context)
{
    for (unsigned i = 0; i < context->n_chunks; i++) {
        for (unsigned j = 0; j < REQUESTS_PER_CHUNK; j++)
            free_edges(context->chunks[i][j].dependents);
        free(context->chunks[i]);
    }
    free(context->chunks);
}
