/* Failures, closing with work in flight, and requests that are taken back, in each order of that with the ends of their
 * blocks. A part of the program of test_aio.c.
 */
#include "test_aio.h"

#include <errno.h>
#include <stdlib.h>

/* A failure poisons a long chain; close cancels what was not begun; the context is freed with results uncollected. */
void check_failures(const char *engine, int fd)
{
    const aio_fault faults[] = {
        {.kind = AIO_WRITE, .file = -1, .error = EIO, .first = 1, .count = 1, .delay_ns = 300000000},
        {.kind = AIO_WRITE, .file = -1, .first = 2, .count = 4, .delay_ns = 50000000}};
    char *memory = buffer_of(REGION, 1);
    char *target = buffer_of(REGION, 2); /* of reads that may run beside writes from memory */
    context = open_on(engine, faults, 2);
    file = aio_add_file(context, fd, 1);
    int64_t first = submit(AIO_WRITE, memory, 0, BLOCK, 0, 0), last = first;
    aio_result result;
    for (int i = 0; i < 2000; i++)
        last = submit(AIO_READ, memory, 0, 4096, i % AIO_PRIORITIES, last);
    CHECK(aio_wait(context, last, 1000, &result) == -ETIMEDOUT);
    CHECK(aio_wait_any(context, &last, 1, 1000) == -ETIMEDOUT);
    CHECK(aio_release(context, last) == -EBUSY);
    int64_t some[] = {first, last, 0};
    CHECK(aio_release_all(context, &last, 1) == 0 && aio_succeeded(context, some, 3) == 0);
    CHECK(some[0] == 0 && some[1] == 0 && some[2] == 0);
    CHECK(finish(last) == -ECANCELED);
    CHECK(aio_wait(context, first, 0, &result) == 0 && result.bytes == -EIO && result.offset == 0);
    some[0] = first;
    CHECK(aio_succeeded(context, some, 1) == 0 && some[0] == 0);
    CHECK(finish(submit(AIO_READ, memory, 0, 4096, 0, first)) == -ECANCELED);
    CHECK(finish(first) == -EIO);
    CHECK(aio_wait(context, first, 0, &result) == -ESTALE);
    CHECK(aio_cancel(context, first) == -ESTALE);
    CHECK(finish(submit(AIO_READ, memory, 0, 4096, 0, first)) == 4096); /* released: no obstacle any more */
    int64_t none = 0;
    CHECK(aio_submit(context, AIO_READ, file, memory + 1, 0, 4096, 0, NULL, 0, &none) == -EINVAL);
    CHECK(aio_submit(context, AIO_READ, file, memory, UINT64_MAX - 4095, 4096, 0, NULL, 0, &none) == -EINVAL);
    CHECK(aio_submit(context, AIO_READ, file, memory, 0, 4096, 0, NULL, 0, NULL) == -EINVAL);
    CHECK(none == 0);

    int64_t begun[4], queued, taken_back, behind_a_read;
    for (int i = 0; i < 4; i++)
        begun[i] = submit(AIO_WRITE, memory, (uint64_t)i * BLOCK, BLOCK, 0, 0);
    aio_file_stats stats;
    do
        CHECK(aio_stats(context, file, &stats) == 0);
    while (stats.kind[AIO_WRITE].in_flight < 4);
    CHECK(aio_cancel(context, begun[3]) == -EBUSY);
    taken_back = submit(AIO_READ, target, 0, 4096, 0, begun[0]);
    behind_a_read = submit(AIO_READ, target, 0, 4096, 0, taken_back);
    CHECK(aio_cancel(context, taken_back) == 0);
    CHECK(finish(behind_a_read) == 4096);
    CHECK(aio_cancel(context, taken_back) == -EALREADY);
    CHECK(finish(taken_back) == -ECANCELED);
    for (int i = 0; i < 4; i++)
        CHECK(finish(begun[i]) == BLOCK);
    aio_free(context);

    const aio_fault slow = {.kind = AIO_WRITE, .file = -1, .first = 1, .delay_ns = 50000000};
    context = open_on(engine, &slow, 1);
    file = aio_add_file(context, fd, 1);
    /* The last one has more blocks than close can find issued. */
    char *large = buffer_of(64 * BLOCK, 1);
    for (int i = 0; i < 4; i++)
        begun[i] = submit(AIO_WRITE, large, (uint64_t)i * BLOCK, i < 3 ? BLOCK : 64 * BLOCK, 0, 0);
    do
        CHECK(aio_stats(context, file, &stats) == 0);
    while (stats.kind[AIO_WRITE].in_flight < 4); /* the depth: of the last one, one block */
    queued = submit(AIO_WRITE, memory, 0, REGION, 2, 0);
    const uint64_t offsets[] = {3 * BLOCK, 0};
    int64_t scattered = submit_scattered(AIO_READ, target, offsets, 2, BLOCK, 0, begun[2]);
    int second = aio_add_file(context, fd, 1);
    const aio_piece pieces[] = {{0, 0, 4096, file}, {4096, BLOCK, 4096, second}};
    int64_t vector = 0;
    CHECK(aio_submit_vector(context, AIO_READ, target, pieces, 2, 0, &begun[3], 1, &vector) == 0);
    CHECK(aio_submit_vector(context, AIO_READ, target, pieces, 0, 0, NULL, 0, &none) == -EINVAL);
    CHECK(aio_submit_vector(context, AIO_FLUSH, target, pieces, 2, 0, NULL, 0, &none) == -EINVAL);
    const aio_piece wrong[] = {{0, 0, 4096, file}, {1, 4096, 4096, second}};
    CHECK(aio_submit_vector(context, AIO_READ, target, wrong, 2, 0, NULL, 0, &none) == -EINVAL);
    CHECK(aio_vector_results(context, vector, &result, 1) == -EBUSY && none == 0);
    submit(AIO_FLUSH, NULL, 0, 0, 0, begun[1]);
    CHECK(aio_close(context) == 0);
    CHECK(aio_close(context) == 0);
    for (int i = 0; i < 3; i++)
        CHECK(finish(begun[i]) == BLOCK);
    CHECK(aio_wait(context, begun[3], 0, &result) == 0 && result.issued_ns != 0);
    CHECK(finish(begun[3]) == -ECANCELED);
    CHECK(aio_stats(context, file, &stats) == 0 && stats.kind[AIO_WRITE].in_flight == 0);
    CHECK(stats.kind[AIO_WRITE].ops < 3 + 64 && stats.kind[AIO_WRITE].errors == 0);
    free(large);
    CHECK(finish(queued) == -ECANCELED);
    CHECK(aio_wait(context, scattered, 0, &result) == 0);
    CHECK(result.bytes == -ECANCELED && result.offset == offsets[0]);
    aio_result parts[2];
    CHECK(aio_vector_results(context, vector, parts, 2) == 2);
    CHECK(parts[0].bytes == -ECANCELED && parts[1].bytes == -ECANCELED && parts[1].file == second);
    CHECK(finish(scattered) == -ECANCELED && finish(vector) == -ECANCELED);
    CHECK(aio_submit(context, AIO_READ, file, memory, 0, 4096, 0, NULL, 0, &none) == -ESHUTDOWN);
    aio_free(context);
    free(target);
    free(memory);
}

static aio_file_stats stats_when(int kind, uint64_t ops, uint64_t in_flight)
{
    aio_file_stats stats;
    do
        CHECK(aio_stats(context, file, &stats) == 0);
    while (stats.kind[kind].ops < ops || stats.kind[kind].in_flight < in_flight);
    return stats;
}

/* A begun request is taken back, in each order of that with the ends of its blocks. */
void check_taking_back(const char *engine, int fd)
{
    enum { LONG = 64 * BLOCK };
    const uint64_t late = 20000000;
    char *memory = buffer_of(LONG, 5), *target = buffer_of(LONG, 6);
    aio_result result, before;
    aio_file_stats stats;
    int64_t oldest, write, read, behind;
    uint64_t issued_ns;

    /* With blocks in flight: it is done when they have ended, and no other was issued. */
    const aio_fault slow = {.kind = AIO_ANY, .file = -1, .first = 1, .delay_ns = late};
    context = open_on(engine, &slow, 1);
    file = aio_add_file(context, fd, 1);
    CHECK(aio_oldest(context, file, &oldest, &issued_ns) == 0 && oldest == 0);
    CHECK(aio_oldest(context, file + 1, &oldest, &issued_ns) == -EINVAL);
    write = submit(AIO_WRITE, memory, 0, LONG, 0, 0);
    stats_when(AIO_WRITE, 4, 4);
    CHECK(aio_oldest(context, file, &oldest, &issued_ns) == 0 && oldest == write && issued_ns > 0);
    CHECK(aio_cancel(context, write) == 0 && aio_cancel(context, write) == 0);
    behind = submit(AIO_READ, target, 0, BLOCK, 0, write);
    CHECK(aio_wait(context, write, -1, &result) == 0 && result.bytes == -ECANCELED);
    CHECK(result.issued_ns && result.done_ns >= result.issued_ns + late && result.offset == 0);
    CHECK(finish(behind) == -ECANCELED); /* a part of a write is none */
    CHECK(aio_cancel(context, write) == -EALREADY);
    stats = stats_when(AIO_WRITE, 0, 0);
    CHECK(stats.kind[AIO_WRITE].in_flight == 0 && stats.kind[AIO_WRITE].ops < 64);
    CHECK(stats.kind[AIO_WRITE].bytes == stats.kind[AIO_WRITE].ops * BLOCK);
    CHECK(finish(write) == -ECANCELED);
    CHECK(aio_oldest(context, file, &oldest, &issued_ns) == 0 && oldest == 0);

    /* A read: what is ordered after it goes on, when its blocks in flight do not use the memory any more. */
    read = submit(AIO_READ, target, 0, LONG, 0, 0);
    stats_when(AIO_READ, 1, 1);
    write = submit(AIO_WRITE, target, 0, BLOCK, 0, read);
    CHECK(aio_cancel(context, read) == 0);
    CHECK(aio_wait(context, write, -1, &result) == 0 && result.bytes == BLOCK);
    CHECK(aio_wait(context, read, 0, &before) == 0 && before.done_ns <= result.issued_ns);
    CHECK(finish(write) == BLOCK && finish(read) == -ECANCELED);

    /* With some of its blocks done and none in flight, because urgent ones have their places: it is done at once. */
    write = submit(AIO_WRITE, memory, 0, LONG, 0, 0);
    int64_t urgent = submit(AIO_WRITE, memory, LONG, LONG, 2, 0);
    do {
        CHECK(aio_oldest(context, file, &oldest, &issued_ns) == 0);
    } while (oldest != urgent);
    CHECK(aio_cancel(context, write) == 0);
    CHECK(aio_wait(context, write, 0, &result) == 0 && result.bytes == -ECANCELED);
    CHECK(result.done_ns >= result.issued_ns);
    CHECK(finish(write) == -ECANCELED);
    CHECK(aio_cancel(context, urgent) == 0 && finish(urgent) == -ECANCELED);
    aio_free(context);

    /* Of two operations in flight, the first is the oldest, also after its block was used by a later one. */
    const aio_fault later = {.kind = AIO_WRITE, .file = -1, .first = 2, .delay_ns = 5 * late};
    context = open_on(engine, &later, 1);
    file = aio_add_file(context, fd, 1);
    CHECK(finish(submit(AIO_WRITE, memory, 0, BLOCK, 0, 0)) == BLOCK);
    write = submit(AIO_WRITE, memory, 0, BLOCK, 0, 0);
    stats_when(AIO_WRITE, 1, 1);
    behind = submit(AIO_WRITE, memory, BLOCK, BLOCK, 0, 0);
    stats = stats_when(AIO_WRITE, 1, 1);
    while (stats.kind[AIO_WRITE].in_flight < 2 && stats.kind[AIO_WRITE].ops < 2)
        CHECK(aio_stats(context, file, &stats) == 0);
    CHECK(aio_oldest(context, file, &oldest, &issued_ns) == 0);
    CHECK(oldest == write || aio_wait(context, write, 0, &result) == 0); /* unless this thread slept */
    CHECK(finish(write) == BLOCK && finish(behind) == BLOCK);
    aio_free(context);

    /* A block fails after that, or is to be read again: it stays cancelled, and is not read again. */
    const aio_fault bad = {.kind = AIO_READ, .file = -1, .first = 1, .error = EIO, .delay_ns = late};
    context = open_on(engine, &bad, 1);
    file = aio_add_file(context, fd, 1);
    read = submit(AIO_READ, target, 0, LONG, 0, 0);
    stats_when(AIO_READ, 0, 4);
    CHECK(aio_cancel(context, read) == 0);
    CHECK(finish(read) == -ECANCELED);
    stats = stats_when(AIO_READ, 0, 0);
    CHECK(stats.kind[AIO_READ].in_flight == 0 && stats.kind[AIO_READ].ops == 0);
    CHECK(stats.kind[AIO_READ].errors == 0); /* none of the three attempts after which a block fails */
    /* A block fails before that. */
    read = submit(AIO_READ, target, 0, LONG, 0, 0);
    CHECK(aio_wait(context, read, -1, &result) == 0 && result.bytes == -EIO && result.passed == -EIO);
    CHECK(aio_cancel(context, read) == -EALREADY && finish(read) == -EIO);
    stats = stats_when(AIO_READ, 0, 0);
    CHECK(stats.kind[AIO_READ].rereads >= 2 && stats.kind[AIO_READ].errors >= 1);
    aio_free(context);

    /* A read is tried twice more, a write is not. */
    const aio_fault twice[] = {
        {.kind = AIO_ANY, .file = -1, .first = 1, .count = 2, .error = ETIMEDOUT},
        {.kind = AIO_ANY, .file = -1, .first = 4, .count = 2, .error = ETIMEDOUT},
    };
    context = open_on(engine, twice, 2);
    file = aio_add_file(context, fd, 1);
    for (int i = 1; i <= 2; i++) {
        read = submit(AIO_READ, target, 0, BLOCK, 0, 0);
        CHECK(aio_wait(context, read, -1, &result) == 0 && result.bytes == BLOCK);
        CHECK(result.passed == -ETIMEDOUT && finish(read) == BLOCK);
        stats = stats_when(AIO_READ, 1, 0);
        CHECK(stats.kind[AIO_READ].rereads == 2u * i && stats.kind[AIO_READ].retries == 2u * i);
    }
    aio_free(context);
    context = open_on(engine, twice, 1);
    file = aio_add_file(context, fd, 1);
    write = submit(AIO_WRITE, memory, 0, BLOCK, 0, 0);
    CHECK(finish(write) == -ETIMEDOUT);
    stats = stats_when(AIO_WRITE, 0, 0);
    CHECK(stats.kind[AIO_WRITE].retries == 0 && stats.kind[AIO_WRITE].errors == 1);
    aio_free(context);
    free(target);
    free(memory);
}
