/* Judging: what follows from the end of an operation.
 *
 * An error fails the request, a short transfer is continued where it stopped (on a direct file, at the last aligned byte
 * before), and a transfer without progress is an error. A read that failed with an error that may pass is tried again,
 * twice: reading changes nothing. A write is not: what a failed one has left on the medium is unknown, and the kernel and
 * the drive have already tried again.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "system.h"

enum {
    MAX_STALLS = 100,      /* consecutive transfers without aligned progress before an error */
    PATIENT_STALLS = 10,   /* consecutive EINTR or EAGAIN before each retry waits for AIO_PAUSE_NS */
    MAX_REFUSALS = 10000,  /* consecutive EINTR or EAGAIN before an error, about ten seconds */
    MAX_REREADS = 2,       /* attempts after a read has failed with an error that may pass */
    REREAD_NS = 100000000, /* pause before each: a drive reconnects, or the kernel takes another path */
};

/* Whether the next attempt of a read may not have this error. The block layer reports EIO for a command that was
 * aborted while the drive was reset, ETIMEDOUT for one without an answer, and ENOLINK for a lost path; network file
 * systems report the first two. A bad medium is ENODATA, which no attempt changes. */
static bool may_pass(int64_t error) { return error == -EIO || error == -ETIMEDOUT || error == -ENOLINK; }

/* Whether the file ends at `offset` or before. */
static bool ends_by(const struct file *file, uint64_t offset)
{
    off_t end = lseek(file->fd, 0, SEEK_END); /* also of a block device; nobody uses the position */
    return end >= 0 && (uint64_t)end <= offset;
}

int aio_judge(const aio_context *context, struct block *block)
{
    struct aio_op *op = &block->op;
    int64_t moved = op->result;
    if (moved == -EINTR || moved == -EAGAIN) {
        block->due_ns = ++block->stalls > PATIENT_STALLS ? aio_now_ns() + AIO_PAUSE_NS : 0;
        return block->stalls < MAX_REFUSALS ? BLOCK_CONTINUE : (int)moved;
    }
    if (op->kind == AIO_READ && may_pass(moved) && block->rereads < MAX_REREADS) {
        block->rereads++;
        block->due_ns = aio_now_ns() + REREAD_NS;
        return BLOCK_REREAD;
    }
    if (moved < 0)
        return (int)moved;
    if (op->kind == AIO_FLUSH || (uint64_t)moved == op->nbytes)
        return BLOCK_COMPLETE;
    if ((uint64_t)moved > op->nbytes)
        return -EIO;
    if (block->merges && op->kind == AIO_READ && ends_by(block->file, op->offset + (uint64_t)moved)) {
        memset(block->bounce + moved, 0, op->nbytes - (size_t)moved);
        return BLOCK_COMPLETE; /* the write that follows extends the file */
    }
    if (block->edge && block->kind == AIO_READ && (uint64_t)moved >= block->start + block->nbytes) {
        bool ends = ends_by(block->file, op->offset + (uint64_t)moved);
        if (context->verify && !ends && ++block->stalls < MAX_STALLS)
            return BLOCK_CONTINUE; /* the checksum covers the whole page */
        memset(block->bounce + moved, 0, op->nbytes - (size_t)moved);
        return BLOCK_COMPLETE; /* the file ends in the padding */
    }
    int stuck = op->kind == AIO_READ ? -ENODATA : -EIO;
    if (moved == 0)
        return stuck;
    moved -= block->file->alignment ? moved % block->file->alignment : 0;
    if (moved == 0)
        return ++block->stalls < MAX_STALLS ? BLOCK_CONTINUE : stuck;
    block->stalls = 0;
    op->data = (char *)op->data + moved;
    op->offset += (uint64_t)moved;
    op->nbytes -= (size_t)moved;
    return BLOCK_CONTINUE;
}
