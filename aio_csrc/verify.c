/* Checksums of pages: CRC32C with the instruction of the CPU, four bytes of memory per page of the file.
 *
 * The unit is a page because every transfer on a direct file covers whole pages, even if a caller reads other ranges
 * than it wrote. The instruction has a latency of three cycles and a throughput of one per cycle, so three pages are
 * summed in parallel: that needs no arithmetic to combine partial sums, and reads 24 bytes in three cycles.
 *
 * Workers sum a block just before it is submitted, and as soon as it is read (see driver.c). The driver stores and
 * compares the sums, so the tree has one user and no lock. The stored value 0 means "no checksum"; a checksum of 0 is
 * stored as 1. All functions but aio_checksum are called by the driver thread only.
 */
#define _GNU_SOURCE
#include "verify.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "aio.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

typedef void sum_pages(const char *data, size_t n_pages, uint32_t *out);

static uint32_t table[8]
                     [256]; /* table[k][b]: the CRC of byte b followed by k zero bytes; written by choose() */

static void fill_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78u : 0); /* the Castagnoli polynomial, bits reversed */
        table[0][byte] = sum;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 255];
}

static uint64_t load(const char *address)
{
    uint64_t word;
    memcpy(&word, address, sizeof word);
    return word;
}

static void sum_by_table(const char *data, size_t n_pages, uint32_t *out)
{
    for (size_t page = 0; page < n_pages; page++, data += AIO_ALIGNMENT) {
        uint32_t sum = ~0u;
        for (int i = 0; i < AIO_ALIGNMENT; i += 8) {
            uint64_t word = load(data + i) ^ sum; /* little endian: other machines are not supported */
            sum = 0;
            for (int k = 0; k < 8; k++)
                sum ^= table[7 - k][word >> 8 * k & 255];
        }
        out[page] = ~sum;
    }
}

/* The loop over three pages at once. add(sum, word) is the instruction that adds eight bytes to a CRC. */
#define SUM_PAGES(add)                                                                                       \
    while (n_pages >= 3) {                                                                                   \
        uint64_t a = ~0u, b = ~0u, c = ~0u;                                                                  \
        for (int i = 0; i < AIO_ALIGNMENT; i += 8) {                                                         \
            a = add(a, load(data + i));                                                                      \
            b = add(b, load(data + AIO_ALIGNMENT + i));                                                      \
            c = add(c, load(data + 2 * AIO_ALIGNMENT + i));                                                  \
        }                                                                                                    \
        out[0] = ~(uint32_t)a, out[1] = ~(uint32_t)b, out[2] = ~(uint32_t)c;                                 \
        data += 3 * AIO_ALIGNMENT, out += 3, n_pages -= 3;                                                   \
    }                                                                                                        \
    for (; n_pages; data += AIO_ALIGNMENT, out++, n_pages--) {                                               \
        uint64_t a = ~0u;                                                                                    \
        for (int i = 0; i < AIO_ALIGNMENT; i += 8)                                                           \
            a = add(a, load(data + i));                                                                      \
        *out = ~(uint32_t)a;                                                                                 \
    }

#if defined(__x86_64__)
__attribute__((target("sse4.2,crc32"))) static void sum_by_instruction(const char *data, size_t n_pages,
                                                                       uint32_t *out)
{
    SUM_PAGES(__builtin_ia32_crc32di)
}

/* __builtin_cpu_supports() would not do: in a program that Zig has linked it is false for every feature. */
static bool has_instruction(void)
{
    unsigned eax, ebx, ecx, edx;

    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_SSE4_2);
}
#elif defined(__aarch64__)
static inline uint64_t add_word(uint64_t sum, uint64_t word)
{
    uint32_t result;
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w1, %2" : "=r"(result) : "r"((uint32_t)sum), "r"(word));
    return result;
}

static void sum_by_instruction(const char *data, size_t n_pages, uint32_t *out) { SUM_PAGES(add_word) }

static bool has_instruction(void) { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
#else
static bool has_instruction(void) { return false; }
#define sum_by_instruction sum_by_table
#endif

static sum_pages *chosen;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void choose(void)
{
    const char *forced = getenv("TIERING_CRC32C"); /* "portable": the code for CPUs without the instruction */
    chosen =
        has_instruction() && !(forced && strcmp(forced, "portable") == 0) ? sum_by_instruction : sum_by_table;
    fill_table();
}

void aio_checksum(const void *pages, size_t n_pages, uint32_t *out)
{
    /* Any thread may be the first one; the table is complete when this returns. */
    pthread_once(&once, choose);
    chosen(pages, n_pages, out);
}

static int store_sum(struct checksums *known, uint64_t page, uint32_t sum)
{
    uint64_t chunk = page / CHECKSUM_FAN, top = chunk / CHECKSUM_FAN;
    if (top >= CHECKSUM_FAN)
        return -EFBIG;
    if (!known->rows && !(known->rows = calloc(CHECKSUM_FAN, sizeof *known->rows)))
        return -ENOMEM;
    struct checksum_row **row = &known->rows[top];
    if (!*row && !(*row = calloc(1, sizeof **row)))
        return -ENOMEM;
    uint32_t **sums = &(*row)->sums[chunk % CHECKSUM_FAN];
    if (!*sums && !(*sums = calloc(CHECKSUM_FAN, sizeof **sums)))
        return -ENOMEM;
    (*sums)[page % CHECKSUM_FAN] = sum ? sum : 1;
    return 0;
}

/* The address of the checksum of a page, or NULL if its node is not allocated. */
static uint32_t *address_of(const struct checksums *known, uint64_t page)
{
    uint64_t chunk = page / CHECKSUM_FAN, top = chunk / CHECKSUM_FAN;
    const struct checksum_row *row = known->rows && top < CHECKSUM_FAN ? known->rows[top] : NULL;
    uint32_t *sums = row ? row->sums[chunk % CHECKSUM_FAN] : NULL;
    return sums ? &sums[page % CHECKSUM_FAN] : NULL;
}

static void delete_sum(struct checksums *known, uint64_t page)
{
    uint32_t *sum = address_of(known, page);
    if (sum)
        *sum = 0;
}

struct page_range aio_whole_pages(uint64_t offset, uint64_t nbytes)
{
    struct page_range pages = {(offset + AIO_ALIGNMENT - 1) / AIO_ALIGNMENT,
                               (offset + nbytes) / AIO_ALIGNMENT};
    /* A range within one page begins after the page's start and ends before its end. */
    pages.end = pages.end > pages.first ? pages.end : pages.first;
    return pages;
}

int aio_checksums_store(struct checksums *known, uint64_t offset, uint64_t nbytes, const uint32_t *sums)
{
    uint64_t end = offset + nbytes;
    if (offset % AIO_ALIGNMENT)
        delete_sum(known, offset / AIO_ALIGNMENT);
    if (end % AIO_ALIGNMENT)
        delete_sum(known, end / AIO_ALIGNMENT);
    struct page_range pages = aio_whole_pages(offset, nbytes);
    for (uint64_t page = pages.first; page < pages.end; page++) {
        int error = store_sum(known, page, *sums++);
        if (error)
            return error;
    }
    return 0;
}

int aio_checksums_compare(const struct checksums *known, uint64_t offset, uint64_t nbytes,
                          const uint32_t *sums, uint64_t *bad)
{
    struct page_range pages = aio_whole_pages(offset, nbytes);
    for (uint64_t page = pages.first; page < pages.end; page++, sums++) {
        const uint32_t *expected = address_of(known, page);
        if (expected && *expected && *expected != (*sums ? *sums : 1)) {
            *bad = page * AIO_ALIGNMENT;
            return -EBADMSG;
        }
    }
    return 0;
}

void aio_checksums_get(const struct checksums *known, uint64_t first, size_t n, uint32_t *sums)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t *sum = address_of(known, first + i);
        sums[i] = sum ? *sum : 0;
    }
}

int aio_checksums_set(struct checksums *known, uint64_t first, size_t n, const uint32_t *sums)
{
    for (size_t i = 0; i < n; i++) {
        int error = 0;
        if (!sums[i])
            delete_sum(known, first + i);
        else if ((error = store_sum(known, first + i, sums[i])))
            return error;
    }
    return 0;
}

void aio_checksums_free(struct checksums *known)
{
    for (int i = 0; known->rows && i < CHECKSUM_FAN; i++) {
        for (int j = 0; known->rows[i] && j < CHECKSUM_FAN; j++)
            free(known->rows[i]->sums[j]);
        free(known->rows[i]);
    }
    free(known->rows);
}
