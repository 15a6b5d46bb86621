/* What the files of the test in C share: one context, and calls whose answers are checked. */
#ifndef TIERING_TEST_AIO_H
#define TIERING_TEST_AIO_H

#include <stddef.h>
#include <stdint.h>

#include "aio.h"
#include "check.h"

enum { BLOCK = 16384, REGION = 4 * BLOCK };

extern aio_context *context;
extern int file;
extern uint32_t alignment; /* as of a device with larger blocks, of which threads merge pieces */

/* A context with these faults, or with checksums if there are none. */
aio_context *open_on(const char *engine, const aio_fault *faults, unsigned n_faults);
int64_t submit(int kind, char *data, uint64_t offset, uint64_t nbytes, int priority, int64_t after);
int64_t submit_scattered(int kind, char *data, const uint64_t *offsets, size_t n, uint64_t each, int priority,
                         int64_t after);
/* Wait for a ticket, check its times, and release it; the bytes or -errno. */
int64_t finish(int64_t ticket);
char *buffer_of(size_t nbytes, int fill);

/* test_aio_failures.c: failures, closing with work in flight, and requests that are taken back. */
void check_failures(const char *engine, int fd);
void check_taking_back(const char *engine, int fd);

#endif
