/* Submissions: the arguments of a request, checked; its pieces, or its parts in several files; and its ticket.
 *
 * Memory that a request takes along is allocated before the lock is taken. An accepted request owns it.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>

static bool is_in_file(uint64_t offset, uint64_t nbytes)
{
    return nbytes <= INT64_MAX && offset <= INT64_MAX - nbytes;
}

/* Queue a request whose files are known, and store its ticket under the lock, so before the driver can issue a block.
 */
static int add(aio_context *context, const struct request *parameters, const int64_t *after, size_t n_after,
               int64_t *ticket)
{
    int64_t added = context->closing ? -ESHUTDOWN : aio_request_add(context, parameters, after, n_after);
    /* Release order: other threads of the caller may read *ticket without the lock, and then call aio_wait. */
    if (added > 0)
        __atomic_store_n(ticket, added, __ATOMIC_RELEASE);
    return added > 0 ? 0 : (int)added;
}

/* The file with that index, if data and what else must be aligned on a direct file are; else NULL. alignment_bits:
 * bitwise OR of offsets and lengths. */
static struct file *find_file(const aio_context *context, int file, const void *data, uint64_t alignment_bits)
{
    if (file < 0 || (unsigned)file >= context->n_files)
        return NULL;
    struct file *found = context->files[file];
    return found->alignment && ((uintptr_t)data | alignment_bits) % AIO_ALIGNMENT ? NULL : found;
}

static bool is_submission(int priority, const int64_t *after, size_t n_after, const int64_t *ticket)
{
    return priority >= 0 && priority < AIO_PRIORITIES && (after || !n_after) && ticket;
}

/* Queue a request of one file, the one with that index. */
static int submit(aio_context *context, struct request *parameters, int file, uint64_t alignment_bits,
                  const int64_t *after, size_t n_after, int64_t *ticket)
{
    if (!is_submission(parameters->priority, after, n_after, ticket) ||
        (parameters->nbytes && !parameters->data))
        return -EINVAL;
    pthread_mutex_lock(&context->lock);
    parameters->file = find_file(context, file, parameters->data, alignment_bits);
    int error =
        parameters->file || context->closing ? add(context, parameters, after, n_after, ticket) : -EINVAL;
    pthread_mutex_unlock(&context->lock);
    return error;
}

int aio_submit(aio_context *context, int kind, int file, void *data, uint64_t offset, uint64_t nbytes,
               int priority, const int64_t *after, size_t n_after, int64_t *ticket)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    if (kind < 0 || kind >= AIO_KINDS)
        return -EINVAL;
    struct request parameters = {.kind = kind, .priority = priority};
    if (kind != AIO_FLUSH) {
        if (!is_in_file(offset, nbytes))
            return -EINVAL;
        parameters.data = data;
        parameters.offset = offset;
        parameters.nbytes = nbytes;
    }
    return submit(context, &parameters, file, parameters.offset, after, n_after, ticket);
}

int aio_submit_scattered(aio_context *context, int kind, int file, void *data, const uint64_t *offsets,
                         size_t n, uint64_t nbytes_each, int priority, const int64_t *after, size_t n_after,
                         int64_t *ticket)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    struct request parameters = {.kind = kind, .priority = priority, .data = data};
    if ((kind != AIO_READ && kind != AIO_WRITE) || (n && !offsets) ||
        __builtin_mul_overflow(n, nbytes_each, &parameters.nbytes) || parameters.nbytes > INT64_MAX)
        return -EINVAL;
    uint64_t alignment_bits = nbytes_each;
    for (size_t i = 0; i < n; i++) {
        if (!is_in_file(offsets[i], nbytes_each))
            return -EINVAL;
        alignment_bits |= offsets[i];
    }
    if (parameters.nbytes) { /* so n > 0 */
        parameters.offset = offsets[0];
        parameters.pieces = calloc(n, sizeof *parameters.pieces);
        if (!parameters.pieces)
            return -ENOMEM;
        for (size_t i = 0; data && i < n; i++)
            parameters.pieces[i] = (struct piece){(char *)data + i * nbytes_each, offsets[i], nbytes_each};
    }
    /* An accepted request owns pieces. */
    int error = submit(context, &parameters, file, alignment_bits, after, n_after, ticket);
    if (error)
        free(parameters.pieces);
    return error;
}

/* Divide pieces of whole->data over the parts of `whole`, one for each file; whole->parts has room for n parts and n
 * pieces. -EINVAL: a piece that its file does not take. */
static int divide(const aio_context *context, struct request *whole, const aio_piece *pieces, size_t n)
{
    struct piece *next = (struct piece *)(whole->parts + n);
    for (size_t i = 0; i < n; i++) {
        char *data = pieces[i].nbytes ? whole->data + pieces[i].at : NULL;
        struct file *file = find_file(context, pieces[i].file, data, pieces[i].offset);
        if (!file)
            return -EINVAL;
        size_t part = 0;
        while (part < whole->n_parts && whole->parts[part].file != file)
            part++;
        /* A piece without bytes has no block. */
        if (part < whole->n_parts || !pieces[i].nbytes)
            continue;
        struct request *added = &whole->parts[whole->n_parts++];
        *added = (struct request){.kind = whole->kind, .priority = whole->priority, .file = file};
        added->offset = added->failed_at = pieces[i].offset;
        added->pieces = next;
        /* The pieces of one file, in one run: the driver takes them in this order. */
        for (size_t j = i; j < n; j++)
            if (pieces[j].file == pieces[i].file && pieces[j].nbytes) {
                *next++ = (struct piece){whole->data + pieces[j].at, pieces[j].offset, pieces[j].nbytes};
                added->nbytes += pieces[j].nbytes;
            }
    }
    whole->n_open = whole->n_parts;
    whole->file = n ? context->files[pieces[0].file] : NULL;
    return 0;
}

int aio_submit_vector(aio_context *context, int kind, void *data, const aio_piece *pieces, size_t n,
                      int priority, const int64_t *after, size_t n_after, int64_t *ticket)
{
    if (aio_is_foreign(context))
        return -ECHILD;
    if ((kind != AIO_READ && kind != AIO_WRITE) || n == 0 || !pieces ||
        !is_submission(priority, after, n_after, ticket))
        return -EINVAL;
    struct request whole = {.kind = kind, .priority = priority, .data = data, .offset = pieces[0].offset};
    for (size_t i = 0; i < n; i++)
        if (!is_in_file(pieces[i].offset, pieces[i].nbytes) || (pieces[i].nbytes && !data) ||
            __builtin_add_overflow(whole.nbytes, pieces[i].nbytes, &whole.nbytes) || whole.nbytes > INT64_MAX)
            return -EINVAL;
    whole.parts = calloc(n, sizeof *whole.parts + sizeof(struct piece));
    if (!whole.parts)
        return -ENOMEM;
    pthread_mutex_lock(&context->lock);
    int error = divide(context, &whole, pieces, n);
    /* An accepted request owns its parts. */
    if (!error)
        error = add(context, &whole, after, n_after, ticket);
    pthread_mutex_unlock(&context->lock);
    if (error)
        free(whole.parts);
    return error;
}
