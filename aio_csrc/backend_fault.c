/* A backend that wraps another one and injects faults: delayed, short or failed operations, and devices that are slow
 * or move no bytes.
 *
 * A delayed operation starts late, so that a test sees how a slow write affects code that does not wait for it.
 * The inner backend gets a copy of each operation, because the driver must not see the size of a shortened one.
 * Each await starts the operations that are due, and sleeps at most until the next one is due.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#include "system.h"

struct held {
    struct aio_op op; /* the copy; if refused, its result is the injected error */
    struct aio_op *original;
    uint64_t due_ns;
    bool refused, moves_none;
    struct held *next;
};

struct planned {
    aio_fault fault;
    uint64_t count;   /* matching operations so far */
    uint64_t free_ns; /* the end of its last operation, if it has a rate */
};

struct faulty {
    struct aio_backend inner;
    uint32_t alignment; /* of direct files, which the kernel would enforce; 0: no other than its own */
    unsigned n_faults;
    struct planned *faults;
    struct held *list;    /* operations that wait for due_ns, unordered */
    struct aio_op *ended; /* operations that were refused, for reap */
    struct held slots[];  /* by op index */
};

/* The first fault that applies to this operation, or NULL. Every fault counts its matching operations, even if an
 * earlier fault applies. */
static struct planned *fate_of(struct faulty *faulty, int kind, int file)
{
    struct planned *fate = NULL;
    for (unsigned i = 0; i < faulty->n_faults; i++) {
        struct planned *planned = &faulty->faults[i];
        const aio_fault *fault = &planned->fault;
        bool kinds_match = fault->kind == kind || (fault->kind == AIO_ANY && kind < AIO_KINDS);
        if (!kinds_match || (fault->file >= 0 && fault->file != file))
            continue;
        uint64_t number = ++planned->count;
        if (!fate && number >= fault->first && (fault->count == 0 || number - fault->first < fault->count))
            fate = planned;
    }
    return fate;
}

/* The time at which the operation may start: after its delay, and as late as the rate of its fault requires. */
static uint64_t due_at(struct planned *planned, uint64_t nbytes)
{
    const aio_fault *fault = &planned->fault;
    uint64_t now = aio_now_ns();
    if (fault->rate) {
        uint64_t start = planned->free_ns > now ? planned->free_ns : now;
        now = planned->free_ns = start + (uint64_t)((double)nbytes * 1e9 / (double)fault->rate);
    }
    return now + fault->delay_ns;
}

static bool is_misaligned(const struct faulty *faulty, const struct aio_op *op)
{
    return faulty->alignment && op->direct && op->kind != AIO_FLUSH &&
           (op->offset | op->nbytes) % faulty->alignment != 0;
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
        struct planned *planned = fate_of(faulty, ops[i]->kind, ops[i]->file);
        const aio_fault *fate = planned ? &planned->fault : NULL;
        *held = (struct held){.op = *ops[i], .original = ops[i]};
        if (fate && fate->error) {
            held->refused = true;
            held->op.result = -fate->error;
        } else if (is_misaligned(faulty, ops[i])) {
            held->refused = true;
            held->op.result = -EINVAL;
        }
        if (fate && fate->short_bytes && fate->short_bytes < held->op.nbytes)
            held->op.nbytes = fate->short_bytes;
        held->moves_none = fate && fate->moves_none;
        hold(faulty, held, planned ? due_at(planned, held->op.nbytes) : 0);
    }
    return (int)n;
}

/* Start or refuse the operations that are due. Returns the time until the next one is due, or < 0 without one. */
static int64_t release_due(struct faulty *faulty)
{
    uint64_t now = aio_now_ns(), next = UINT64_MAX;
    struct held **link = &faulty->list;
    while (*link) {
        struct held *held = *link;
        struct aio_op *op = &held->op;
        if (held->due_ns <= now) {
            bool ends = held->refused || held->moves_none;
            int64_t answer = held->refused      ? op->result
                             : held->moves_none ? (int64_t)op->nbytes
                                                : faulty->inner.ops->submit(&faulty->inner, &op, 1);
            if (answer != -EAGAIN || ends) {
                *link = held->next;
                if (answer < 0 || ends) {
                    held->original->result = answer;
                    held->original->next = faulty->ended;
                    faulty->ended = held->original;
                }
                continue;
            }
            held->due_ns = now + 1000000;
        }
        next = held->due_ns < next ? held->due_ns : next;
        link = &held->next;
    }
    return faulty->list ? (int64_t)(next - now) : -1;
}

static void fault_await(struct aio_backend *backend, int64_t timeout_ns)
{
    struct faulty *faulty = backend->state;
    int64_t next = release_due(faulty);
    if (next >= 0 && (timeout_ns < 0 || next < timeout_ns))
        timeout_ns = next;
    faulty->inner.ops->await(&faulty->inner, faulty->ended ? 0 : timeout_ns);
}

static unsigned fault_reap(struct aio_backend *backend, struct aio_op **ended, unsigned max)
{
    struct faulty *faulty = backend->state;
    unsigned n = 0;
    for (; faulty->ended && n < max; faulty->ended = faulty->ended->next)
        ended[n++] = faulty->ended;
    unsigned first = n;
    n += faulty->inner.ops->reap(&faulty->inner, ended + n, max - n);
    for (unsigned i = first; i < n; i++) {
        struct held *held = &faulty->slots[ended[i]->index];
        /* The driver knows only the original: the copy stays in its slot until the next operation of this index. */
        held->original->result = ended[i]->result;
        ended[i] = held->original;
    }
    backend->flags = faulty->inner.flags;
    backend->files_error = faulty->inner.files_error;
    return n;
}

static void fault_wake(struct aio_backend *backend)
{
    struct faulty *faulty = backend->state;
    faulty->inner.ops->wake(&faulty->inner);
}

static int fault_register_buffer(struct aio_backend *backend, unsigned number, void *address, size_t nbytes)
{
    struct faulty *faulty = backend->state;
    struct aio_backend *inner = &faulty->inner;
    const struct planned *fate = fate_of(faulty, AIO_REGISTER, -1);
    if (fate && fate->fault.error)
        return -fate->fault.error;
    int error = inner->ops->register_buffer ? inner->ops->register_buffer(inner, number, address, nbytes)
                                            : -EOPNOTSUPP;
    backend->flags = inner->flags;
    return error;
}

static void fault_exit(struct aio_backend *backend, int forked)
{
    struct faulty *faulty = backend->state;
    faulty->inner.ops->exit(&faulty->inner, forked);
    free(faulty->faults);
    free(faulty);
}

static const struct aio_backend_ops fault_ops = {
    .submit = fault_submit,
    .await = fault_await,
    .reap = fault_reap,
    .wake = fault_wake,
    .register_buffer = fault_register_buffer,
    .exit = fault_exit,
};

int aio_backend_add_faults(struct aio_backend *backend, const aio_options *options, unsigned capacity)
{
    unsigned n_faults = options->n_faults;
    struct faulty *faulty = calloc(1, sizeof *faulty + capacity * sizeof faulty->slots[0]);
    struct planned *planned = calloc(n_faults + 1, sizeof *planned);
    if (!faulty || !planned) {
        free(planned);
        free(faulty);
        return -ENOMEM;
    }
    for (unsigned i = 0; i < n_faults; i++)
        planned[i].fault = options->faults[i];
    faulty->inner = *backend;
    faulty->faults = planned;
    faulty->n_faults = n_faults;
    faulty->alignment = options->alignment;
    backend->ops = &fault_ops;
    backend->state = faulty;
    return 0;
}
