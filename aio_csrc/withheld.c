/* Memory that forked children do not get, and whose addresses stay reserved in them. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "aio.h"

struct aio_withheld {
    void *address;
    size_t nbytes;
    struct aio_withheld *next, **link; /* (lock) link: the pointer that points to this range */
};

/* Guards the list. Held during fork, so that a child inherits a consistent list. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct aio_withheld *all; /* (lock) head of the list */

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* Reserve the addresses of all ranges. MAP_FIXED_NOREPLACE: a fork handler that ran before this one may have mapped
 * other memory there, which stays. */
static void after_fork_in_child(void)
{
    for (const struct aio_withheld *range = all; range; range = range->next)
        (void)mmap(range->address, range->nbytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

int aio_withhold(aio_withheld **out, void *address, size_t nbytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    struct aio_withheld *range = malloc(sizeof *range);
    if (!range)
        return -ENOMEM;
    /* Before the range is added to the list: the handler in a child expects that no listed range is inherited. */
    if (madvise(address, nbytes, MADV_DONTFORK) < 0) {
        int error = -errno;
        free(range);
        return error;
    }
    *range = (struct aio_withheld){.address = address, .nbytes = nbytes};
    pthread_mutex_lock(&lock);
    range->next = all;
    range->link = &all;
    if (all)
        all->link = &range->next;
    all = range;
    pthread_mutex_unlock(&lock);
    *out = range;
    return 0;
}

void aio_forget_withheld(aio_withheld *range)
{
    pthread_mutex_lock(&lock);
    *range->link = range->next;
    if (range->next)
        range->next->link = range->link;
    pthread_mutex_unlock(&lock);
    free(range);
}
