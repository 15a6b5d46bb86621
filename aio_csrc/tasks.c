/* Tasks: calls between transfers, run by one thread from a completion to the next submissions.
 *
 * The thread holds the lock only to look for a task whose tickets are done, and sleeps on `any` if there is none. It
 * knows nothing of what it calls.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>

#include "system.h"

/* 0: the waits of the task are over; -EAGAIN: they are not; -ECANCELED: a ticket has failed. With the lock. */
static int check_waits(aio_context *context, const aio_task *task)
{
    int answer = 0;
    for (size_t i = 0; i < task->n_waits; i++) {
        int64_t ticket = *task->waits[i];
        int error;
        struct request *request = ticket ? aio_request_find(context, ticket, &error) : NULL;
        if (request && request->state == REQUEST_DONE && request->result < 0)
            return -ECANCELED;
        if (request && request->state != REQUEST_DONE)
            /* Whichever is done first wakes this thread. */
            request->watched |= WATCHED_AMONG_OTHERS;
        if (!ticket || (request && request->state != REQUEST_DONE))
            answer = -EAGAIN;
        else if (!request && error != -ESTALE)
            return error;
    }
    return answer;
}

/* The first task that can begin, with *error 0; else NULL with *error -EAGAIN or the reason why none will. */
static aio_task *find_ready(aio_context *context, aio_task *tasks, size_t n, int *error)
{
    int answer = -EAGAIN;
    for (size_t i = 0; i < n; i++) {
        if (tasks[i].began_ns)
            continue;
        *error = check_waits(context, &tasks[i]);
        if (*error == 0)
            return &tasks[i];
        /* A failure stops the run, but only when no task can go on. */
        answer = *error == -EAGAIN ? answer : *error;
    }
    *error = answer;
    return NULL;
}

static int submit_all(aio_context *context, const aio_task *task)
{
    for (size_t i = 0; i < task->n_submissions; i++) {
        aio_submission *each = &task->submissions[i];
        int64_t *after = each->n_after ? malloc(each->n_after * sizeof *after) : NULL;
        if (each->n_after && !after)
            return -ENOMEM;
        for (size_t k = 0; k < each->n_after; k++)
            after[k] = *each->after[k];
        each->submitted_ns = aio_now_ns();
        int error = aio_submit_vector(context, each->kind, each->data, each->pieces, each->n, each->priority,
                                      after, each->n_after, each->ticket);
        free(after);
        if (error)
            return error;
    }
    return 0;
}

int aio_run(aio_context *context, aio_task *tasks, size_t n, int64_t timeout_ns, uint64_t *idle_ns)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    struct timespec deadline = aio_deadline_after(timeout_ns < 0 ? 0 : timeout_ns);
    uint64_t began_ns = aio_now_ns();
    size_t n_left = 0;
    for (size_t i = 0; i < n; i++)
        n_left += tasks[i].began_ns == 0;
    int error = 0;
    while (n_left && !error) {
        aio_task *task;
        int waited = 0;
        pthread_mutex_lock(&context->lock);
        while (!(task = find_ready(context, tasks, n, &error)) && error == -EAGAIN && !waited) {
            *idle_ns = *idle_ns ? *idle_ns : aio_now_ns();
            waited = timeout_ns < 0 ? pthread_cond_wait(&context->any, &context->lock)
                                    : pthread_cond_timedwait(&context->any, &context->lock, &deadline);
        }
        pthread_mutex_unlock(&context->lock);
        if (!task)
            return error == -EAGAIN ? -ETIMEDOUT : error;
        task->idle_ns = *idle_ns;
        *idle_ns = 0;
        task->began_ns = aio_now_ns();
        error = task->answer = task->call(task->argument);
        task->ended_ns = aio_now_ns();
        if (!error)
            error = submit_all(context, task);
        n_left--;
        if (!error && n_left && timeout_ns >= 0 && aio_now_ns() - began_ns >= (uint64_t)timeout_ns)
            error = -ETIMEDOUT;
    }
    return error;
}
