/* A backend in front of another one that makes chosen operations go wrong: late, short, or not at all.
 *
 * A delayed operation is held back here and begins late, so that a test sees what a slow write really does to
 * whoever does not wait for it. The inner backend works on a copy of each operation (a shortened one must not
 * show the driver that it was shortened). Both sources of events, the inner backend and the timer of what is
 * held, hang on one epoll descriptor, which polls like any other.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

struct held {
    struct aio_op op; /* the copy; its result is set already when the operation is not to be begun */
    struct aio_op *original;
    uint64_t due_ns;
    int refused;
    struct held *next;
};

struct planned {
    aio_fault fault;
    uint64_t seen; /* operations of its kind so far */
};

struct faulty {
    struct aio_backend inner;
    int timer_fd, event_fd;
    unsigned n_faults;
    struct planned *faults;
    struct held *list;   /* waiting for their time, in no order */
    struct held slots[]; /* by op index */
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Every fault counts what it could meet, also when an earlier one decides. */
static const aio_fault *fate_of(struct faulty *faulty, const struct aio_op *op)
{
    const aio_fault *fate = NULL;
    for (unsigned i = 0; i < faulty->n_faults; i++) {
        struct planned *planned = &faulty->faults[i];
        const aio_fault *fault = &planned->fault;
        if (fault->kind != AIO_ANY && fault->kind != op->kind)
            continue;
        uint64_t number = ++planned->seen;
        if (!fate && number >= fault->first && (fault->count == 0 || number - fault->first < fault->count))
            fate = fault;
    }
    return fate;
}

static void set_timer(struct faulty *faulty)
{
    struct itimerspec when = {0}; /* all zero: disarmed */
    uint64_t due = UINT64_MAX;
    for (struct held *held = faulty->list; held; held = held->next)
        due = held->due_ns < due ? held->due_ns : due;
    if (faulty->list) {
        when.it_value.tv_sec = (time_t)(due / 1000000000u);
        when.it_value.tv_nsec = (long)(due % 1000000000u);
    }
    timerfd_settime(faulty->timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void hold(struct faulty *faulty, struct held *held, uint64_t due_ns)
{
    held->due_ns = due_ns;
    held->next = faulty->list;
    faulty->list = held;
}

static int fault_submit(struct aio_backend *backend, struct aio_op **ops, unsigned n)
{
    struct faulty *faulty = backend->state;
    for (unsigned i = 0; i < n; i++) {
        struct held *held = &faulty->slots[ops[i]->index];
        const aio_fault *fate = fate_of(faulty, ops[i]);
        *held = (struct held){.op = *ops[i], .original = ops[i]};
        if (fate && fate->error) {
            held->refused = 1;
            held->op.result = -fate->error;
        }
        if (fate && fate->short_bytes && fate->short_bytes < held->op.nbytes)
            held->op.nbytes = fate->short_bytes;
        hold(faulty, held, now_ns() + (fate ? fate->delay_ns : 0));
    }
    set_timer(faulty); /* what is due already is begun by the reap that the timer wakes */
    return (int)n;
}

/* Begin, or end, what is due. */
static unsigned release_due(struct faulty *faulty, struct aio_op **ended, unsigned max)
{
    uint64_t now = now_ns();
    unsigned n = 0;
    struct held **link = &faulty->list;
    while (*link && n < max) {
        struct held *held = *link;
        if (held->due_ns > now) {
            link = &held->next;
            continue;
        }
        struct aio_op *op = &held->op;
        int answer = held->refused ? (int)op->result : faulty->inner.ops->submit(&faulty->inner, &op, 1);
        if (answer == -EAGAIN && !held->refused) {
            held->due_ns = now + 1000000;
            link = &held->next;
            continue;
        }
        *link = held->next;
        if (answer < 0) {
            held->original->result = answer;
            ended[n++] = held->original;
        }
    }
    return n;
}

static unsigned fault_reap(struct aio_backend *backend, struct aio_op **ended, unsigned max)
{
    struct faulty *faulty = backend->state;
    uint64_t expirations;
    ssize_t quiet = read(faulty->timer_fd, &expirations, sizeof expirations);
    (void)quiet; /* EAGAIN: it was the inner backend */
    unsigned n = release_due(faulty, ended, max);
    set_timer(faulty);
    unsigned first = n;
    n += faulty->inner.ops->reap(&faulty->inner, ended + n, max - n);
    for (unsigned i = first; i < n; i++) {
        struct held *held = &faulty->slots[ended[i]->index];
        held->original->result = ended[i]->result;
        ended[i] = held->original;
    }
    return n;
}

static void fault_exit(struct aio_backend *backend, int forked)
{
    struct faulty *faulty = backend->state;
    faulty->inner.ops->exit(&faulty->inner, forked);
    close(faulty->timer_fd);
    close(faulty->event_fd);
    free(faulty->faults);
    free(faulty);
}

static const struct aio_backend_ops fault_ops = {
    .submit = fault_submit,
    .reap = fault_reap,
    .exit = fault_exit,
};

static int watch(struct faulty *faulty, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_ctl(faulty->event_fd, EPOLL_CTL_ADD, fd, &event);
}

int aio_backend_add_faults(struct aio_backend *backend, const aio_fault *faults, unsigned n_faults,
                           unsigned capacity)
{
    struct faulty *faulty = calloc(1, sizeof *faulty + capacity * sizeof faulty->slots[0]);
    struct planned *planned = calloc(n_faults, sizeof *planned);
    int error = -ENOMEM;
    if (!faulty || !planned)
        goto no_memory;
    for (unsigned i = 0; i < n_faults; i++)
        planned[i].fault = faults[i];
    faulty->inner = *backend;
    faulty->faults = planned;
    faulty->n_faults = n_faults;
    faulty->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    faulty->event_fd = epoll_create1(EPOLL_CLOEXEC);
    if (faulty->timer_fd < 0 || faulty->event_fd < 0 || watch(faulty, faulty->timer_fd) ||
        watch(faulty, backend->event_fd))
        goto no_descriptor;
    *backend = (struct aio_backend){.ops = &fault_ops, .state = faulty, .event_fd = faulty->event_fd};
    return 0;

no_descriptor:
    error = -errno;
    if (faulty->timer_fd >= 0)
        close(faulty->timer_fd);
    if (faulty->event_fd >= 0)
        close(faulty->event_fd);
no_memory:
    free(planned);
    free(faulty);
    return error;
}
