/* Waits for tickets, their results, cancellation and release.
 *
 * A thread that waits for one ticket sleeps on one of WAIT_SHARDS condition variables, by slot; a thread that waits for
 * any of several tickets sleeps on `any`.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <time.h>

#include "system.h"

/* The request if the ticket is done; else NULL, with *error 0 if it can be waited for, or -errno. */
static struct request *find_done(aio_context *context, int64_t ticket, int *error)
{
    struct request *request = aio_request_find(context, ticket, error);
    return request && !*error && request->state == REQUEST_DONE ? request : NULL;
}

static aio_result result_of(const struct request *request)
{
    return (aio_result){.bytes = request->result,
                        .offset = request->result < 0 ? request->failed_at : request->offset,
                        .file = request->file->index,
                        .passed = request->passed,
                        .issued_ns = request->issued_ns,
                        .done_ns = request->done_ns};
}

int aio_wait(aio_context *context, int64_t ticket, int64_t timeout_ns, aio_result *result)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    struct timespec deadline = {0};
    if (timeout_ns > 0)
        deadline = aio_deadline_after(timeout_ns);
    int error, waited = 0;
    struct request *request;
    pthread_mutex_lock(&context->lock);
    /* Look the ticket up after every sleep: another thread may have released it, and its slot may hold another
     * request. */
    while (!(request = find_done(context, ticket, &error)) && !error) {
        if (timeout_ns == 0 || waited == ETIMEDOUT) {
            error = -ETIMEDOUT;
            break;
        }
        request = aio_request_find(context, ticket, &error);
        /* Under the lock under which the request becomes done: the driver signals only requests that are watched. */
        request->watched |= WATCHED_ALONE;
        pthread_cond_t *done = aio_request_signal(context, request);
        waited = timeout_ns < 0 ? pthread_cond_wait(done, &context->lock)
                                : pthread_cond_timedwait(done, &context->lock, &deadline);
    }
    if (!error)
        /* Copied under the lock: after it, another thread may release the ticket. */
        *result = result_of(request);
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_vector_results(aio_context *context, int64_t ticket, aio_result *results, size_t max)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    if (max && !results)
        return -EINVAL;
    int answer;
    pthread_mutex_lock(&context->lock);
    const struct request *request = aio_request_find(context, ticket, &answer);
    if (request && request->state != REQUEST_DONE)
        answer = -EBUSY;
    else if (request)
        answer = (int)request->n_parts;
    for (size_t i = 0; answer > 0 && i < (size_t)answer && i < max; i++)
        results[i] = result_of(&request->parts[i]);
    pthread_mutex_unlock(&context->lock);
    return answer;
}

/* The index of the first done ticket, -ETIMEDOUT if none is done, or the error of an invalid one. */
static int64_t find_any(aio_context *context, const int64_t *tickets, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int error;
        if (find_done(context, tickets[i], &error))
            return (int64_t)i;
        if (error)
            return error;
        /* Each of them: whichever is done first wakes this thread. */
        aio_request_find(context, tickets[i], &error)->watched |= WATCHED_AMONG_OTHERS;
    }
    return -ETIMEDOUT;
}

int64_t aio_wait_any(aio_context *context, const int64_t *tickets, size_t n, int64_t timeout_ns)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    if (n == 0 || !tickets)
        return -EINVAL;
    struct timespec deadline = {0};
    if (timeout_ns > 0)
        deadline = aio_deadline_after(timeout_ns);
    int waited = 0;
    int64_t index;
    pthread_mutex_lock(&context->lock);
    while ((index = find_any(context, tickets, n)) == -ETIMEDOUT && timeout_ns != 0 && waited != ETIMEDOUT)
        waited = timeout_ns < 0 ? pthread_cond_wait(&context->any, &context->lock)
                                : pthread_cond_timedwait(&context->any, &context->lock, &deadline);
    pthread_mutex_unlock(&context->lock);
    return index;
}

int aio_cancel(aio_context *context, int64_t ticket)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    int error;
    pthread_mutex_lock(&context->lock);
    struct request *request = aio_request_find(context, ticket, &error);
    if (!error)
        error = aio_request_cancel(context, request);
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_release(aio_context *context, int64_t ticket)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    int error;
    pthread_mutex_lock(&context->lock);
    struct request *request = aio_request_find(context, ticket, &error);
    if (!error && request->state != REQUEST_DONE)
        error = -EBUSY;
    if (!error)
        aio_request_release(context, request);
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_succeeded(aio_context *context, int64_t *tickets, size_t n)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    pthread_mutex_lock(&context->lock);
    for (size_t i = 0; i < n; i++) {
        int error;
        const struct request *request = find_done(context, tickets[i], &error);
        if (!request || request->result < 0 || request->passed)
            tickets[i] = 0;
    }
    pthread_mutex_unlock(&context->lock);
    return 0;
}

int aio_release_all(aio_context *context, const int64_t *tickets, size_t n)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    pthread_mutex_lock(&context->lock);
    for (size_t i = 0; i < n; i++) {
        int error;
        struct request *request = find_done(context, tickets[i], &error);
        if (request)
            aio_request_release(context, request);
    }
    pthread_mutex_unlock(&context->lock);
    return 0;
}
